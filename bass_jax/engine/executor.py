"""What a scheduler gives orders to: a device, or a model of one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from bass_jax.decoding.state import StepInfo
from bass_jax.engine.request import RequestHandle


class StepResult(NamedTuple):
    """What one step did."""

    info: StepInfo  # on the host; tokens of a simulation mean nothing
    draft_len: int  # the bucket that it ran in
    seconds: float = 0.0  # from its dispatch until its results were on the host


@runtime_checkable
class Executor(Protocol):
    """Holds the batch: one prompt that is being read, and rows that run.

    The rows form a batch of one of the configured sizes. A row that is stopped or finished stays until another
    request is inserted in its place, or the batch is regrouped without it.
    """

    def read(self, handle: RequestHandle, start: int, num: int) -> None:
        """Reads the next `num` tokens of a prompt, at most a chunk; `start` 0 begins another prompt.

        All but the last token of a prompt are read; `num` is 0 for a prompt of one token.
        """
        ...

    def insert(self, handle: RequestHandle, row: int) -> None:
        """Puts the prompt that was read into `row`."""
        ...

    def regroup(self, sources: Sequence[int]) -> None:
        """Makes a batch of ``len(sources)`` rows; row i is what was ``sources[i]``, and free where that is -1."""
        ...

    def stop(self, row: int) -> None:
        """Frees `row`, which may be running."""
        ...

    def dispatch(self) -> None:
        """Begins a step of all running rows."""
        ...

    def collect(self) -> StepResult:
        """Waits for the step that was begun: the one time the host reads from the device."""
        ...
