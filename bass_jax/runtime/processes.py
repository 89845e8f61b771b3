"""Sends values from process 0 of `jax.distributed` to the other processes."""

import itertools
import pickle
from typing import Any

import jax

_NUMBERS = itertools.count()
_NUM_KEPT = 1000  # values; no process is so far behind, because each step of a sharded model needs all processes
_NO_TIMEOUT = 10**12  # milliseconds; if process 0 ends, jax ends the others


class Channel:
    """A sequence of values that process 0 decides and that all processes use.

    The values go through the key-value store of `jax.distributed`. Unlike a collective of the devices, it can wait for
    any time, and waits for no computation of a device. Every process makes its channels, and calls `share`, in the same
    order.
    """

    def __init__(self):
        self._name, self._num = f"bass_jax/{next(_NUMBERS)}", 0

    def share(self, value: Any = None) -> Any:
        """Returns the `value` of process 0 in every process. It is pickled."""
        from jax._src import distributed  # There is no public way to the store.

        client: Any = distributed.global_state.client
        group, index = divmod(self._num, _NUM_KEPT)
        self._num += 1
        key = f"{self._name}/{group}/{index}"
        if jax.process_index() > 0:
            return pickle.loads(client.blocking_key_value_get_bytes(key, _NO_TIMEOUT))
        client.key_value_set_bytes(key, pickle.dumps(value))
        if index == 0:
            client.key_value_delete(f"{self._name}/{group - 2}/")
        return value
