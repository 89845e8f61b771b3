"""One engine over several processes: process 0 serves the requests, and the others repeat its calls of the executor."""

from collections.abc import Sequence
from typing import Any

from bass_jax.engine.device_executor import DeviceExecutor
from bass_jax.engine.executor import StepResult
from bass_jax.engine.request import RequestHandle
from bass_jax.runtime.processes import Channel


class Leader:
    """The executor of process 0. It sends every call to the other processes before it runs it."""

    def __init__(self, executor: DeviceExecutor, channel: Channel):
        self._executor, self._channel = executor, channel
        self._reading: RequestHandle | None = None

    def read(self, handle: RequestHandle, start: int, num: int) -> None:
        """Sends the request with the first chunk of its prompt."""
        is_first, self._reading = self._reading is not handle, handle
        self._channel.share(("read", handle.request if is_first else None, start, num))
        self._executor.read(handle, start, num)

    def insert(self, handle: RequestHandle, row: int) -> None:
        """Sends the row; the request is the one that was read."""
        self._channel.share(("insert", row))
        self._executor.insert(handle, row)

    def regroup(self, sources: Sequence[int]) -> None:
        """Sends the sources."""
        self._channel.share(("regroup", sources))
        self._executor.regroup(sources)

    def stop(self, row: int) -> None:
        """Sends the row."""
        self._channel.share(("stop", row))
        self._executor.stop(row)

    def dispatch(self) -> None:
        """Starts the step in all processes."""
        self._channel.share(("dispatch",))
        self._executor.dispatch()

    def can_run_ahead(self) -> bool:
        """Returns False: the other processes wait for a step before they take another call."""
        return False

    def collect(self) -> StepResult:
        """Waits for the step. The other processes wait for it without being told."""
        return self._executor.collect()

    def discard(self) -> None:
        """Is not called, because no step runs ahead."""

    def close(self) -> None:
        """Ends `follow` in the other processes."""
        self._channel.share(("close",))


def follow(executor: DeviceExecutor, channel: Channel, tokenizer: Any) -> None:
    """Repeats the calls of the `Leader` in another process until it closes; `tokenizer` reads grammars."""
    while True:
        match channel.share():
            case "read", request, start, num:
                if request is not None:
                    handle = RequestHandle(request)
                    if request.sampling.grammar is not None:
                        request.sampling.grammar.compile(tokenizer)
                executor.read(handle, start, num)
            case "insert", row:
                executor.insert(handle, row)
            case ("dispatch",):
                executor.dispatch()
                executor.collect()
            case ("close",):
                return
            case method, argument:
                getattr(executor, method)(argument)
