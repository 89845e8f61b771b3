"""The protocol of executors: a real device, or a simulated one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from bass_jax.decoding.state import StepInfo
from bass_jax.engine.request import RequestHandle


class StepResult(NamedTuple):
    """The result of one step."""

    info: StepInfo  # on the host; the tokens of a simulation are arbitrary
    draft_len: int  # the draft-length bucket
    seconds: float = 0.0  # from the dispatch, or the end of the step before, until the next step is planned


@runtime_checkable
class Executor(Protocol):
    """Holds a batch of rows, and one prompt that is being read.

    The batch has one of the configured sizes. The row of an ended request is free; `insert` puts another request there,
    and `regroup` can drop it.
    """

    def read(self, handle: RequestHandle, start: int, num: int) -> None:
        """Reads the next `num` tokens of a prompt, from position `start` on, at most `EngineConfig.chunk`.

        All tokens of a prompt except the last are read, so `num` is 0 for a prompt of one token.
        """
        ...

    def insert(self, handle: RequestHandle, row: int) -> None:
        """Moves the prompt that was read into `row`."""
        ...

    def regroup(self, sources: Sequence[int]) -> None:
        """Makes a batch of ``len(sources)`` rows. Row i is the old row ``sources[i]``, or free if that is -1."""
        ...

    def stop(self, row: int) -> None:
        """Ends the request in `row`."""
        ...

    def dispatch(self) -> None:
        """Starts a step of all running rows."""
        ...

    def can_run_ahead(self) -> bool:
        """Returns whether another step of the same rows can be dispatched while one is in flight."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight and returns its result. Only here does the host read from the device."""
        ...

    def discard(self) -> None:
        """Forgets the step in flight, in which no request runs, without waiting for it."""
        ...
