"""The host loop of continuous batching, for a real device and for a simulated one."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bass_jax.decoding.state import FinishReason, TokenLogprobs
from bass_jax.engine.executor import Executor, StepResult
from bass_jax.engine.request import CANCELLED, FAILED, EngineClosed, RequestEvent, RequestHandle
from bass_jax.engine.scheduler import Scheduler


class QueueFull(RuntimeError):  # noqa: N818, as in `asyncio.QueueFull`
    """The queue holds `EngineConfig.max_waiting` requests; submit again later."""


class Counts(NamedTuple):
    """Totals of a loop."""

    num_steps: int = 0
    num_row_steps: int = 0  # running rows, summed over the steps
    num_batch_rows: int = 0  # rows of the batch, summed over the steps
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_chunks: int = 0  # prefill chunks
    num_read: int = 0  # prompt tokens in them
    num_regroups: int = 0
    num_finished: int = 0  # requests that have ended, for any reason


class Loop:
    """Moves requests from the queue into slots and runs the steps.

    `advance` collects the step in flight, schedules, and dispatches the next step. It delivers the events while the
    device runs, so that only scheduling delays the next step. With ``is_pipelined=False``, as in `bass_jax.generate`,
    it schedules, dispatches, collects and delivers, so that the events are those of the step that it has just run.

    Where the rows stay the same, the next step is dispatched before the last one is collected, so that the device does
    not wait for the host. It is then known one step late that a request has stopped, and what the step ahead emits for
    it is dropped. Nothing is scheduled while a step is ahead.

    Attributes:
        scheduler: the queue and the rows.
        executor: the device.
        clock: returns the time in seconds.
        counts: totals so far.
        last: the result of the last step; None before the first one.
        events: delivered by the last `advance`.
        requests: ``[B]`` int32, the arrival number of the request in each row of the last step; -1 for a free row.
        host_seconds: wall time in which the host takes results and schedules, without the executor's time. The device
            waits for it unless a step is ahead.
        intake: called after a step and before the next one is scheduled. A program with one thread submits the
            requests here that arrived during the step.
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
        """Makes an idle loop.

        Args:
            scheduler: decides which requests run.
            executor: the device.
            clock: returns the time in seconds.
            on_step: called on the host after every step.
            is_pipelined: deliver the events of a step while the next one runs. Otherwise `advance` waits for the step
                that it dispatches.
        """
        self.scheduler, self.executor, self.clock = scheduler, executor, clock
        self.counts = Counts()
        self.last: StepResult | None = None
        self.host_seconds, self._executor_seconds = 0.0, 0.0
        self.intake: Callable[[], None] = lambda: None
        self.events: list[tuple[RequestHandle, RequestEvent]] = []
        self.requests = np.zeros(0, np.int32)
        self._on_step, self._is_pipelined = on_step, is_pipelined
        self._num_in_flight = 0
        self._arrived: deque[RequestHandle] = deque()
        self._cancelled: deque[RequestHandle] = deque()
        self._lock = threading.Lock()
        # Reentrant, because a callback can advance the loop.
        self._stepping = threading.RLock()
        self._num_arrived = 0
        self._undelivered: deque[tuple[RequestHandle, RequestEvent]] = deque()
        self._closed: EngineClosed | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the loop takes no further requests."""
        return self._closed is not None

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._arrived) + self.scheduler.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._arrived or self._cancelled or self._num_in_flight) and self.scheduler.is_idle

    def submit(self, handle: RequestHandle) -> None:
        """Adds a request to the queue. Can be called from any thread.

        Raises:
            QueueFull: if the queue is full.
            EngineClosed: after `close`, or after a step that failed.
        """
        most = self.scheduler.config.max_waiting
        with self._lock:
            if self._closed is not None:
                raise EngineClosed(str(self._closed)) from self._closed.__cause__
            if self.num_waiting >= most:
                raise QueueFull(f"{most} requests are waiting: expected fewer than max_waiting={most}")
            handle.order = self._num_arrived
            self._num_arrived += 1
            handle.times.submitted = self.clock()
            self._arrived.append(handle)

    def start(self, handles: list[RequestHandle]) -> None:
        """Starts with a batch whose first rows run `handles`; their prompts have been read."""
        now = self.clock()
        for handle in handles:
            handle.order, self._num_arrived = self._num_arrived, self._num_arrived + 1
            handle.times.submitted = handle.times.admitted = handle.times.begun = now
        self.scheduler.start(handles)

    def cancel(self, handle: RequestHandle) -> None:
        """Ends a request before the next step. Can be called from any thread."""
        if handle.finish_reason is None:
            self._cancelled.append(handle)

    def advance(self) -> bool:
        """Runs one step; returns False if there was nothing to do. Any thread can call it; one runs at a time.

        If the step raises an exception, all requests end with the reason ``"error"``, and the loop takes no others.
        """
        with self._stepping:
            try:
                return not self.is_idle and self._advance()
            except Exception as error:
                self._fail(error)
                raise

    def close(self, *, drain: bool = False) -> None:
        """Refuses further requests, and waits until the others have ended. Can be called from any thread.

        Args:
            drain: complete the other requests. Otherwise they are cancelled and keep their tokens.
        """
        with self._lock:
            self._closed = self._closed or EngineClosed("the engine is closed")
        with self._stepping:
            if not drain:
                self._cancelled.extend([*self._arrived, *self.scheduler.unfinished()])
            self.run()

    def _fail(self, error: Exception) -> None:
        closed = EngineClosed(f"a step of the engine failed: {type(error).__name__}: {error}")
        closed.__cause__ = error
        with self._lock:
            self._closed = closed
            unfinished = [*self._arrived, *self.scheduler.unfinished()]
            self._arrived.clear()
            self._cancelled.clear()
            self.scheduler, self._num_in_flight = Scheduler(self.scheduler.config), 0
        for handle in unfinished:
            handle.error = closed
            self._undelivered.append((handle, handle.end(FAILED, self.clock())))
        while self._undelivered:
            handle, event = self._undelivered.popleft()
            handle.deliver(event)

    def _advance(self) -> bool:
        self.events = events = []
        has_stepped = self._num_in_flight > 0
        if has_stepped:
            self._collect()
        start, in_executor = time.perf_counter(), self._executor_seconds
        if has_stepped:
            self._take_results(events)
        self._take_arrivals(events)
        if not self._num_in_flight:
            self._schedule()
        self.host_seconds += time.perf_counter() - start - (self._executor_seconds - in_executor)
        if self._num_in_flight and not self._is_pipelined and not has_stepped:
            self._collect()
            self._take_results(events)
            has_stepped = True
        self._undelivered.extend(events)
        events.clear()
        while self._undelivered:
            handle, event = self._undelivered.popleft()
            events.append((handle, handle.deliver(event)))
            if handle.error is not None and handle.finish_reason is None:
                self._cancelled.append(handle)
        if has_stepped and self._on_step is not None:
            self._on_step(self)
        return True

    def _collect(self) -> None:
        is_steady = not (self._arrived or self._cancelled) and self.scheduler.is_steady
        if is_steady and self._num_in_flight == 1 and self.executor.can_run_ahead():
            self._dispatch()
        self.last = self.executor.collect()
        self._num_in_flight -= 1
        self.intake()

    def _dispatch(self) -> None:
        self._call(self.executor.dispatch)
        self._num_in_flight += 1

    def _discard(self) -> None:
        """Forgets the step ahead if its last request has ended."""
        if self._num_in_flight and not self.scheduler.num_running:
            self.executor.discard()
            self._num_in_flight = 0

    def run(self) -> None:
        """Advances until there is nothing to do."""
        while self.advance():
            pass

    def _call(self, method: Callable, *arguments) -> None:
        """Calls a method of the executor and adds its time to the executor's."""
        start = time.perf_counter()
        method(*arguments)
        self._executor_seconds += time.perf_counter() - start

    def _take_results(self, events: list[tuple[RequestHandle, RequestEvent]]) -> None:
        """Gives the tokens of the last step to their requests, and ends requests at stop strings."""
        assert self.last is not None
        self._drop([row for row, handle in enumerate(self.scheduler.rows) if handle is None])
        info, now = self.last.info, self.clock()
        is_active, num_emitted, finish = (np.asarray(x) for x in (info.is_active, info.num_emitted, info.finish))
        tokens, logprobs = np.asarray(info.tokens), np.asarray(info.logprobs)
        counts = self.counts
        rows, num_finished = np.flatnonzero(is_active).tolist(), counts.num_finished
        self.requests = np.full(len(is_active), -1, np.int32)
        num_drafted, num_accepted = (np.asarray(x) for x in (info.num_drafted, info.num_accepted))
        for row, num, reason in zip(rows, num_emitted[rows].tolist(), finish[rows].tolist(), strict=True):
            handle = self.scheduler.rows[row]
            assert handle is not None
            handle.num_steps += 1
            handle.num_drafted += int(num_drafted[row])
            handle.num_accepted += int(num_accepted[row])
            self.requests[row] = handle.order
            token_logprobs = (
                None
                if info.token_logprobs is None
                else TokenLogprobs(*(field[row, :num] for field in info.token_logprobs))
            )
            event = handle.record(tokens[row, :num], logprobs[row, :num], token_logprobs, reason, now)
            events.append((handle, event))
            if handle.finish_reason is not None:
                num_finished += 1
                self.scheduler.release(handle)
                if reason == FinishReason.RUNNING:  # The request ended at a stop string, which the device cannot see.
                    self._call(self.executor.stop, row)
                if handle.is_cut:
                    self._cut(row, len(event.tokens))
        num_emitted = np.asarray(self.last.info.num_emitted)
        self.counts = counts._replace(
            num_steps=counts.num_steps + 1,
            num_row_steps=counts.num_row_steps + len(rows),
            num_batch_rows=counts.num_batch_rows + len(is_active),
            num_drafted=counts.num_drafted + int(num_drafted.sum()),
            num_accepted=counts.num_accepted + int(num_accepted.sum()),
            num_emitted=counts.num_emitted + int(num_emitted.sum()),
            num_finished=num_finished,
        )
        self._discard()

    def _drop(self, rows: list[int]) -> None:
        """Removes rows whose requests have ended before the last step from its info."""
        assert self.last is not None
        info = self.last.info
        if not np.asarray(info.is_active)[rows].any():
            return
        names = ("is_active", "num_emitted", "num_accepted", "num_drafted", "tokens", "logprobs")
        fields = {name: np.array(getattr(info, name)) for name in names}
        for name, values in fields.items():
            values[rows] = -1 if name == "tokens" else 0
        self.last = self.last._replace(info=info._replace(**fields))

    def _cut(self, row: int, num: int) -> None:
        """Removes the tokens after a stop string from the info of the last step."""
        assert self.last is not None
        info = self.last.info
        fields = {name: np.array(getattr(info, name)) for name in ("num_emitted", "finish", "tokens", "logprobs")}
        fields["num_emitted"][row], fields["finish"][row] = num, FinishReason.STOP
        fields["tokens"][row, num:], fields["logprobs"][row, num:] = -1, 0.0
        self.last = self.last._replace(info=info._replace(**fields))

    def _take_arrivals(self, events: list[tuple[RequestHandle, RequestEvent]]) -> None:
        """Queues the new requests, and ends the cancelled ones."""
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
                self._call(self.executor.stop, row)
        self._discard()

    def _schedule(self) -> None:
        """Admits requests, reads prompts, resizes the batch, and dispatches a step."""
        scheduler, executor = self.scheduler, self.executor
        num_chunks, num_read, num_regroups = 0, 0, 0
        for handle in scheduler.admit():
            handle.times.admitted = self.clock()
        while (sources := scheduler.shrink()) is not None:
            self._call(executor.regroup, sources)
            num_regroups += 1
        for chunk in scheduler.chunks():
            self._call(executor.read, chunk.handle, chunk.start, chunk.num)
            num_chunks += chunk.num > 0
            num_read += chunk.num
            if chunk.is_last:
                while (sources := scheduler.grow()) is not None:
                    self._call(executor.regroup, sources)
                    num_regroups += 1
                self._call(executor.insert, chunk.handle, scheduler.place(chunk.handle))
                chunk.handle.times.begun = self.clock()
        counts = self.counts
        self.counts = counts._replace(
            num_chunks=counts.num_chunks + num_chunks,
            num_read=counts.num_read + num_read,
            num_regroups=counts.num_regroups + num_regroups,
        )
        if scheduler.num_running:
            self._dispatch()
