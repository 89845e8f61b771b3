"""An executor without a device: rows emit tokens that depend on the seed, and every call is checked."""

import numpy as np

from bass_jax.decoding.state import FinishReason, StepInfo
from bass_jax.engine.executor import StepResult
from bass_jax.engine.request import Request, RequestHandle


def expected_tokens(request: Request) -> np.ndarray:
    """Returns the tokens that the fake emits for a request: its seed, plus 0, 1, 2 and so on."""
    return request.seed + np.arange(request.max_new_tokens)


class FakeExecutor:
    """Emits one to three tokens per row and step. `log` contains the calls.

    With `runs_ahead`, it takes two steps before it returns the first one.
    """

    def __init__(self, num_rows: int = 1, chunk: int = 8, seed: int = 0, *, runs_ahead: bool = False):
        self.rows: list[RequestHandle | None] = [None] * num_rows
        self.given: dict[RequestHandle, int] = {}
        self.log: list[tuple] = []
        self._chunk, self._random = chunk, np.random.default_rng(seed)
        self._reading: tuple[RequestHandle, int] | None = None
        self._in_flight: list[dict[int, RequestHandle]] = []
        self._runs_ahead = runs_ahead

    def read(self, handle, start, num):
        assert not self._in_flight
        assert 0 <= num <= self._chunk
        if start == 0:
            self._reading = (handle, 0)
        assert self._reading == (handle, start), "chunks come in order, one prompt at a time"
        self._reading = (handle, start + num)
        self.log.append(("read", handle, num))

    def insert(self, handle, row):
        assert not self._in_flight
        assert self._reading == (handle, len(handle.request.prompt) - 1), "the whole prompt was read"
        assert self.rows[row] is None, "the row is free"
        self._reading, self.rows[row], self.given[handle] = None, handle, 0
        self.log.append(("insert", handle, row))

    def regroup(self, sources):
        assert not self._in_flight
        kept = [source for source in sources if source >= 0]
        running = [row for row, handle in enumerate(self.rows) if handle is not None]
        assert set(running) <= set(kept) and len(set(kept)) == len(kept), "every running row is kept once"
        self.rows = [None if source < 0 else self.rows[source] for source in sources]
        self.log.append(("regroup", len(sources)))

    def stop(self, row):
        assert self.rows[row] is not None
        self.rows[row] = None

    def dispatch(self):
        assert len(self._in_flight) <= self._runs_ahead and any(self.rows)
        running = {row: handle for row, handle in enumerate(self.rows) if handle is not None}
        self._in_flight.append(running)
        self.log.append(("step", len(running), len(self.rows)))

    @property
    def num_in_flight(self):
        return len(self._in_flight)

    def can_run_ahead(self):
        return self._runs_ahead

    def discard(self):
        assert self._in_flight and not any(self.rows)
        self._in_flight.clear()
        self.log.append(("discard",))

    def collect(self):
        num_rows = len(self.rows)
        counts = {name: np.zeros(num_rows, np.int32) for name in ("num_emitted", "finish", "num_drafted")}
        is_active, tokens = np.zeros(num_rows, bool), np.full((num_rows, 3), -1, np.int32)
        for row, handle in self._in_flight.pop(0).items():
            if self.given[handle] == len(expected_tokens(handle.request)):  # It has ended in the step before.
                continue
            expected, start = expected_tokens(handle.request), self.given[handle]
            num = min(int(self._random.integers(1, 4)), len(expected) - start)
            is_active[row], counts["num_emitted"][row] = True, num
            tokens[row, :num] = expected[start : start + num]
            self.given[handle] += num
            if start + num == len(expected):
                counts["finish"][row], self.rows[row] = FinishReason.LENGTH, None
        info = StepInfo(
            is_active,
            tokens,
            num_emitted=counts["num_emitted"],
            num_accepted=counts["num_emitted"] - 1,
            num_drafted=counts["num_drafted"],
            logprobs=np.zeros(tokens.shape, np.float32),
            finish=counts["finish"],
        )
        return StepResult(info, 2)
