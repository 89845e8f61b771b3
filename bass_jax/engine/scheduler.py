"""Decides which request waits, which prompt is read, and which request runs in which row."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bass_jax.engine.engine_config import EngineConfig
from bass_jax.engine.request import RequestHandle

SHRINK_AFTER = 4
"""The number of consecutive steps in which all requests would fit into a smaller batch, before it shrinks."""


class PrefillChunk(NamedTuple):
    """A part of a prompt that is read in one pass."""

    handle: RequestHandle
    start: int
    num: int
    is_last: bool


class Scheduler:
    """Decides which requests run. It uses neither the device nor a clock.

    Requests are admitted by priority, then by arrival. A smaller request does not overtake a larger one, so no request
    starves. An admitted request keeps its slot and its token reservation until it ends.

    Attributes:
        config: sizes and limits.
        rows: the request in each row of the batch; None for a free row.
        reading: admitted requests whose prompts are not read yet; the first one is being read.
        num_waiting: number of requests in the queue.
        num_reserved: tokens reserved by the admitted requests.
    """

    def __init__(self, config: EngineConfig, num_shared: Callable[[RequestHandle], int] = lambda handle: 0):
        """Makes an idle scheduler.

        Args:
            config: sizes and limits.
            num_shared: returns how many tokens at the beginning of a prompt need not be read.
        """
        self.config, self._num_shared = config, num_shared
        self.rows: list[RequestHandle | None] = [None] * config.sizes[0]
        self.reading: deque[RequestHandle] = deque()
        self.num_waiting = 0
        self.num_reserved = 0
        self._queue: list[tuple[int, int, RequestHandle]] = []
        self._row_of: dict[RequestHandle, int] = {}
        self._num_read: int | None = None  # of the first prompt of `reading`; None before its first chunk
        self._num_small_steps = 0

    @property
    def num_running(self) -> int:
        """The number of rows that take part in the next step."""
        return len(self._row_of)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, is read or runs."""
        return not (self._row_of or self.reading or self.num_waiting)

    @property
    def is_steady(self) -> bool:
        """Whether the next step has the same rows as the last one: no request can be admitted, read or moved."""
        return not (self.reading or self._can_admit or self._is_oversized)

    def start(self, handles: Sequence[RequestHandle]) -> None:
        """Starts with a batch whose first rows run `handles`, before anything is submitted."""
        self.rows = [*handles, *[None] * (self.config.sizes[-1] - len(handles))]
        self._row_of = {handle: row for row, handle in enumerate(handles)}
        self.num_reserved = sum(self.config.reservation(handle.request.limit) for handle in handles)

    def unfinished(self) -> list[RequestHandle]:
        """Returns the requests that wait, are read or run."""
        waiting = [handle for _, _, handle in sorted(self._queue, key=lambda entry: entry[:2])]
        return [one for one in (*self._row_of, *self.reading, *waiting) if one.finish_reason is None]

    def submit(self, handle: RequestHandle) -> None:
        """Adds a request to the queue."""
        heapq.heappush(self._queue, (-handle.request.priority, handle.order, handle))
        self.num_waiting += 1

    def release(self, handle: RequestHandle) -> int | None:
        """Removes a request that has ended; returns its row, or None if it had none."""
        row = self._row_of.pop(handle, None)
        if row is not None:
            self.rows[row] = None
        elif handle in self.reading:
            if self.reading[0] is handle:
                self._num_read = None
            self.reading.remove(handle)
        else:
            # The heap keeps the request until `admit` reaches and skips it.
            self.num_waiting -= 1
            return None
        self.num_reserved -= self.config.reservation(handle.request.limit)
        return row

    def admit(self) -> list[RequestHandle]:
        """Admits waiting requests while there are free slots and tokens; returns them."""
        admitted = []
        if self.config.batching == "static" and (self._row_of or self.reading):
            return admitted
        while self._can_admit:
            handle = heapq.heappop(self._queue)[2]
            self.num_waiting -= 1
            self.num_reserved += self.config.reservation(handle.request.limit)
            self.reading.append(handle)
            admitted.append(handle)
        return admitted

    @property
    def _can_admit(self) -> bool:
        """Whether there are a slot and tokens for the first request of the queue."""
        while self._queue and self._queue[0][2].finish_reason is not None:  # It was cancelled.
            heapq.heappop(self._queue)
        if not self._queue or self.num_running + len(self.reading) >= self.config.num_slots:
            return False
        return self.num_reserved + self.config.reservation(self._queue[0][2].request.limit) <= self.config.budget

    def chunks(self) -> Iterator[PrefillChunk]:
        """Yields the prompt chunks to read before the next step; the caller places a prompt after its last chunk.

        While rows are running, there are at most `EngineConfig.chunks_per_step` chunks. Otherwise the first prompt is
        read completely. With static batching all prompts are.
        """
        is_static = self.config.batching == "static"
        num_left = self.config.chunks_per_step if self._row_of and not is_static else None
        while self.reading:
            handle = self.reading[0]
            start = self._num_shared(handle) if self._num_read is None else self._num_read
            num_tokens = len(handle.request.prompt) - 1
            num = min(self.config.chunk, num_tokens - start)
            if num_left == 0 and num > 0:
                return
            self._num_read = start + num
            is_last = self._num_read == num_tokens
            yield PrefillChunk(handle, start, num, is_last)
            if num_left is not None:
                num_left -= num > 0
            elif is_last and not is_static:
                num_left = self.config.chunks_per_step

    def grow(self) -> list[int] | None:
        """Returns the sources of a larger batch if no row is free; otherwise None."""
        if None in self.rows:
            return None
        size = next(size for size in self.config.sizes if size > len(self.rows))
        return self._move([*range(len(self.rows))], size)

    def place(self, handle: RequestHandle) -> int:
        """Moves the first request of `reading`, whose prompt was read, into a free row; returns the row."""
        self.reading.popleft()
        self._num_read = None
        row = self.rows.index(None)
        self.rows[row], self._row_of[handle] = handle, row
        return row

    def shrink(self) -> list[int] | None:
        """Returns the sources of the next smaller batch if all requests have fitted into it for some steps.

        Without running requests the batch shrinks immediately.
        """
        is_oversized = self._is_oversized
        self._num_small_steps = self._num_small_steps + 1 if is_oversized else 0
        if not is_oversized or (self._row_of and self._num_small_steps <= SHRINK_AFTER):
            return None
        self._num_small_steps = 0
        return self._move(sorted(self._row_of.values()), self._smaller)

    @property
    def _smaller(self) -> int:
        """The next smaller size of the batch, or the smallest one."""
        sizes = self.config.sizes
        return sizes[max(sizes.index(len(self.rows)) - 1, 0)]

    @property
    def _is_oversized(self) -> bool:
        """Whether all requests fit into the next smaller batch."""
        if self.config.batching == "static" and self._row_of:
            return False
        return self._smaller < len(self.rows) and self.num_running + len(self.reading) <= self._smaller

    def _move(self, kept: list[int], size: int) -> list[int]:
        sources = kept + [-1] * (size - len(kept))
        self.rows = [None if source < 0 else self.rows[source] for source in sources]
        self._row_of = {handle: row for row, handle in enumerate(self.rows) if handle is not None}
        return sources
