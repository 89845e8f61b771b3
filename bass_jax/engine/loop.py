"""The loop of continuous batching: the same for a device in real time and for a model of one in simulated time."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bass_jax.decoding.state import FinishReason, TokenLogprobs
from bass_jax.engine.executor import Executor, StepResult
from bass_jax.engine.request import CANCELLED, FAILED, RequestEvent, RequestHandle
from bass_jax.engine.scheduler import Scheduler


class QueueFull(RuntimeError):  # noqa: N818, as in `asyncio.QueueFull`
    """The engine has as many waiting requests as it was told to hold; ask again later."""


class Counts(NamedTuple):
    """What a loop has done since it was made."""

    num_steps: int = 0
    num_row_steps: int = 0  # running rows, added up over the steps
    num_batch_rows: int = 0  # rows of the batch, added up over the steps
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_chunks: int = 0  # passes over prompts
    num_regroups: int = 0
    num_finished: int = 0  # requests that ended, however


class Loop:
    """Takes requests through queue, slots and steps.

    `advance` finishes the step in flight, decides, begins the next, and hands out events while the device is at work.
    So what the host does between two steps is deciding alone.

    Attributes:
        scheduler: who waits and who runs.
        executor: the device.
        clock: seconds.
        counts: so far.
        last: the last step's result; None before the first.
        events: handed out by the last `advance`.
        requests: ``[B]`` int32, the order of the request in each row of the last step; -1 without one.
        host_seconds: wall time between the end of a step and the beginning of the next, without the executor's own.
        intake: called when a step has ended and before the next is decided, to submit what has come meanwhile; a
            program of one thread has no other chance to.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[["Loop"], None] | None = None,
        *,
        is_pipelined: bool = True,
    ):
        """Starts idle.

        Args:
            scheduler: decides who runs.
            executor: the device.
            clock: seconds.
            on_step: called after every step, on the host.
            is_pipelined: hand out the events of a step while the next one runs. Otherwise `advance` waits for the
                step that it dispatches, so that the time of a step holds none of the caller's.
        """
        self.scheduler, self.executor, self.clock = scheduler, executor, clock
        self.counts = Counts()
        self.last: StepResult | None = None
        self.host_seconds = 0.0
        self.intake: Callable[[], None] = lambda: None
        self.events: list[tuple[RequestHandle, RequestEvent]] = []
        self.requests = np.zeros(0, np.int32)
        self._on_step, self._is_pipelined = on_step, is_pipelined
        self._is_in_flight = False
        self._arrived: deque[RequestHandle] = deque()
        self._cancelled: deque[RequestHandle] = deque()
        self._lock = threading.Lock()
        # A callback may advance the loop itself.
        self._stepping = threading.RLock()
        self._num_arrived = 0

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do."""
        return not (self._arrived or self._cancelled or self._is_in_flight) and self.scheduler.is_idle

    def submit(self, handle: RequestHandle) -> None:
        """Puts a request into the queue, from any thread.

        Raises:
            QueueFull: if the queue is.
        """
        most = self.scheduler.config.max_waiting
        with self._lock:
            if len(self._arrived) + self.scheduler.num_waiting >= most:
                raise QueueFull(f"{most} requests are waiting: expected fewer than max_waiting={most}")
            handle.order = self._num_arrived
            self._num_arrived += 1
            handle.times.submitted = self.clock()
            self._arrived.append(handle)

    def start(self, handles: list[RequestHandle]) -> None:
        """Notes that the executor begins with a batch whose first rows run `handles`, their prompts read."""
        now = self.clock()
        for handle in handles:
            handle.order, self._num_arrived = self._num_arrived, self._num_arrived + 1
            handle.times.submitted = handle.times.admitted = handle.times.begun = now
        self.scheduler.start(handles)

    def cancel(self, handle: RequestHandle) -> None:
        """Ends a request before the next step, from any thread."""
        self._cancelled.append(handle)

    def advance(self) -> bool:
        """Takes one step, from any thread, one at a time; False when there was nothing to do."""
        with self._stepping:
            return not self.is_idle and self._advance()

    def _advance(self) -> bool:
        self.events = events = []
        has_stepped = self._is_in_flight
        if has_stepped:
            self._collect()
        start, in_executor = time.perf_counter(), self._executor_seconds
        if has_stepped:
            self._note(events)
        self._sort_in(events)
        self._decide()
        self.host_seconds += time.perf_counter() - start - (self._executor_seconds - in_executor)
        if self._is_in_flight and not self._is_pipelined:
            self._collect()
            self._note(events)
            has_stepped = True
        for index, (handle, event) in enumerate(events):
            events[index] = handle, handle.deliver(event)
            if handle.error is not None and handle.finish_reason is None:
                self._cancelled.append(handle)
        if has_stepped and self._on_step is not None:
            self._on_step(self)
        return True

    def _collect(self) -> None:
        self.last = self.executor.collect()
        self._is_in_flight = False
        self.intake()

    def run(self) -> None:
        """Advances until nothing is left to do."""
        while self.advance():
            pass

    _executor_seconds = 0.0

    def _ask(self, order: Callable, *arguments) -> None:
        """Gives the executor an order, timed apart."""
        start = time.perf_counter()
        order(*arguments)
        self._executor_seconds += time.perf_counter() - start

    def _note(self, events: list[tuple[RequestHandle, RequestEvent]]) -> None:
        """Reads what the last step emitted for every row, and cuts it at stop strings."""
        assert self.last is not None
        info, now = self.last.info, self.clock()
        is_active, num_emitted, finish = (np.asarray(x) for x in (info.is_active, info.num_emitted, info.finish))
        tokens, logprobs = np.asarray(info.tokens), np.asarray(info.logprobs)
        counts = self.counts
        rows, num_finished = np.flatnonzero(is_active).tolist(), counts.num_finished
        self.requests = np.full(len(is_active), -1, np.int32)
        for row, num, reason in zip(rows, num_emitted[rows].tolist(), finish[rows].tolist(), strict=True):
            handle = self.scheduler.rows[row]
            assert handle is not None, "a row without a request took part in a step"
            self.requests[row] = handle.order
            token_logprobs = (
                None
                if info.token_logprobs is None
                else TokenLogprobs(*(field[row, :num] for field in info.token_logprobs))
            )
            event = handle.take(tokens[row, :num], logprobs[row, :num], token_logprobs, reason, now)
            events.append((handle, event))
            if handle.finish_reason is not None:
                num_finished += 1
                self.scheduler.release(handle)
                if reason == FinishReason.RUNNING:  # The device does not know stop strings.
                    self._ask(self.executor.stop, row)
                if handle.is_cut:
                    self._cut(row, len(event.tokens))
        num_emitted = np.asarray(self.last.info.num_emitted)
        self.counts = counts._replace(
            num_steps=counts.num_steps + 1,
            num_row_steps=counts.num_row_steps + len(rows),
            num_batch_rows=counts.num_batch_rows + len(is_active),
            num_drafted=counts.num_drafted + int(np.asarray(info.num_drafted).sum()),
            num_accepted=counts.num_accepted + int(np.asarray(info.num_accepted).sum()),
            num_emitted=counts.num_emitted + int(num_emitted.sum()),
            num_finished=num_finished,
        )

    def _cut(self, row: int, num: int) -> None:
        """Takes what follows a stop string out of the info of the last step."""
        assert self.last is not None
        info = self.last.info
        fields = {name: np.array(getattr(info, name)) for name in ("num_emitted", "finish", "tokens", "logprobs")}
        fields["num_emitted"][row], fields["finish"][row] = num, FinishReason.STOP
        fields["tokens"][row, num:], fields["logprobs"][row, num:] = -1, 0.0
        self.last = self.last._replace(info=info._replace(**fields))

    def _sort_in(self, events: list[tuple[RequestHandle, RequestEvent]]) -> None:
        """Takes note of who has come and who has gone."""
        while self._arrived:
            with self._lock:
                self.scheduler.submit(self._arrived.popleft())
        while self._cancelled:
            handle = self._cancelled.popleft()
            if handle.finish_reason is not None:
                continue
            events.append((handle, handle.end(CANCELLED if handle.error is None else FAILED, self.clock())))
            self.counts = self.counts._replace(num_finished=self.counts.num_finished + 1)
            row = self.scheduler.release(handle)
            if row is not None:
                self._ask(self.executor.stop, row)

    def _decide(self) -> None:
        """Fills free slots, reads prompts, keeps the batch in the size it needs, and begins a step."""
        scheduler, executor = self.scheduler, self.executor
        num_chunks, num_regroups = 0, 0
        for handle in scheduler.admit():
            handle.times.admitted = self.clock()
        while (sources := scheduler.shrink()) is not None:
            self._ask(executor.regroup, sources)
            num_regroups += 1
        for chunk in scheduler.chunks():
            self._ask(executor.read, chunk.handle, chunk.start, chunk.num)
            num_chunks += chunk.num > 0
            if chunk.is_last:
                while (sources := scheduler.grow()) is not None:
                    self._ask(executor.regroup, sources)
                    num_regroups += 1
                self._ask(executor.insert, chunk.handle, scheduler.place(chunk.handle))
                chunk.handle.times.begun = self.clock()
        counts = self.counts
        self.counts = counts._replace(
            num_chunks=counts.num_chunks + num_chunks, num_regroups=counts.num_regroups + num_regroups
        )
        if scheduler.num_running:
            self._ask(executor.dispatch)
            self._is_in_flight = True
