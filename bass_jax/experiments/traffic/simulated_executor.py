"""The executor of a simulated device: it counts as the decoder does, and a cost model says how long that takes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bass_jax.decoding.state import FinishReason, StepInfo
from bass_jax.engine import EngineConfig, Request, RequestHandle
from bass_jax.engine.executor import StepResult
from bass_jax.engine.slots import has_rows, plan_rows
from bass_jax.experiments.traffic.clocks import SimulatedClock
from bass_jax.experiments.traffic.serving_costs import ServingCosts, StepTable, grid
from bass_jax.policies import Policy
from bass_jax.policies.protocol import plan_bucket, policy_buckets

_plan_rows = jax.jit(plan_rows)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedRequest(Request):
    """A request whose answer is known.

    Attributes:
        num_tokens: what the answer comes to.
        acceptable: ``[num_tokens]`` int, drafts that would be accepted if drafting began there.
    """

    num_tokens: int
    acceptable: np.ndarray


def constant_plan(policy: Policy, num_rows: int) -> int | None:
    """The draft length that `policy` plans for every row of such a batch whatever happens; None if it looks at steps.

    A policy without a state whose plan is computed from none of its inputs need not be asked after every step.
    """
    if jax.tree.leaves(policy.init(num_rows)):
        return None

    def plan(rows, counts):
        _, made, _ = plan_rows(policy, None, rows, counts, np.float32(np.nan))
        return made

    nothing = np.zeros(num_rows, np.int32)
    arguments = (nothing,) * 4, (nothing.astype(bool), nothing, nothing, nothing)
    traced = jax.make_jaxpr(plan)(*arguments)
    reached = set(map(id, traced.jaxpr.invars))
    for equation in traced.jaxpr.eqns:  # in the order in which they are computed
        if any(id(value) in reached for value in equation.invars):
            reached |= set(map(id, equation.outvars))
    if any(id(value) in reached for value in traced.jaxpr.outvars):
        return None
    made = plan(*arguments)
    lengths = np.asarray(made.draft_lens)
    return int(lengths[0]) if made.min_confidence is None and (lengths == lengths[0]).all() else None


class SimulatedExecutor:
    """Rows as numbers. The policy is the decoder's own code, under the decoder's own rules."""

    def __init__(self, policy: Policy, costs: ServingCosts, config: EngineConfig, clock: SimulatedClock):
        """Starts with free rows.

        Raises:
            ValueError: if the policy looks at the draft's probabilities, which nobody simulates.
        """
        self._policy, self._costs, self._config, self._clock = policy, costs, config, clock
        self._buckets = policy_buckets(policy)
        self._table = StepTable(costs.steps, config, self._buckets)
        self._row_leaves = has_rows(policy)
        self._has_row_leaves = any(jax.tree.leaves(self._row_leaves))
        self._contexts = grid(config.capacity)
        size = config.sizes[0]
        self._handles: list[RequestHandle | None] = [None] * size
        self._lengths, self._limits = np.ones(size, np.int32), np.ones(size, np.int32)
        self._positions, self._num_behind = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._draft_lens = np.zeros(size, np.int32)
        self._policy_state: Any = policy.init(size)
        self._wanted = np.zeros(2, np.int32)
        self._room_of_new = 0
        self._num_read = 0
        self._pending = 0.0
        self._constant: dict[int, int | None] = {}
        nothing = np.zeros(size, np.int32)
        self._plan((nothing.astype(bool), nothing, nothing, nothing), nothing + FinishReason.INACTIVE)

    def read(self, handle: RequestHandle, start: int, num: int) -> None:
        """Takes the time of a pass over a chunk."""
        del handle
        self._num_read = start + num
        if num:
            self._pending += float(np.interp(start, self._contexts, self._costs.chunk))

    def insert(self, handle: RequestHandle, row: int) -> None:
        """Fills a row."""
        self._handles[row] = handle
        self._lengths[row], self._limits[row] = len(handle.request.prompt), handle.request.limit
        self._positions[row], self._num_behind[row] = 0, 0
        self._draft_lens[row] = self._draft_lens.max()
        if self._has_row_leaves:
            fresh = self._policy.init(len(self._handles))
            self._policy_state = jax.tree.map(
                lambda is_row, leaf, new: leaf.at[row].set(new[row]) if is_row else leaf,
                self._row_leaves, self._policy_state, fresh,
            )  # fmt: skip
        self._room_of_new = max(self._room_of_new, handle.request.max_new_tokens - 1)
        self._pending += self._costs.insert

    def regroup(self, sources: Sequence[int]) -> None:
        """Moves rows into a batch of another size."""
        self._pending += self._costs.regroup[len(self._handles), len(sources)]
        rows = np.maximum(sources, 0)
        self._handles = [None if source < 0 else self._handles[source] for source in sources]
        for name in ("_lengths", "_limits", "_positions", "_num_behind", "_draft_lens"):
            setattr(self, name, getattr(self, name)[rows])
        if self._has_row_leaves:
            self._policy_state = jax.tree.map(
                lambda is_row, leaf: leaf[rows] if is_row else leaf, self._row_leaves, self._policy_state
            )

    def stop(self, row: int) -> None:
        """Frees a row."""
        self._handles[row] = None

    def dispatch(self) -> None:
        """Nothing to begin: the step is taken when it is collected."""

    def collect(self) -> StepResult:
        """Counts a step, and lets its time pass."""
        size = len(self._handles)
        is_active = np.array([handle is not None for handle in self._handles])
        rows = np.flatnonzero(is_active)
        num_wanted = int(max(self._wanted[0], min(self._wanted[1], self._room_of_new)))
        self._room_of_new = 0
        bucket = plan_bucket(self._buckets, num_wanted)
        room = self._limits - self._lengths
        drafted = np.where(is_active, np.clip(np.minimum(self._draft_lens, room - 1), 0, bucket), 0).astype(np.int32)
        accepted, emitted = np.zeros(size, np.int32), np.zeros(size, np.int32)
        finish = np.full(size, FinishReason.INACTIVE, np.int32)
        for row in rows.tolist():
            request: Any = self._handles[row].request  # type: ignore[union-attr]
            position = self._positions[row]
            accepted[row] = min(request.acceptable[position], drafted[row])
            emitted[row] = min(accepted[row] + 1, request.num_tokens - position)
            is_over = position + emitted[row] == request.num_tokens
            reason = FinishReason.STOP if request.num_tokens < request.max_new_tokens else FinishReason.LENGTH
            finish[row] = reason if is_over else FinishReason.RUNNING
        most = int(drafted.max())
        behind = int(np.where(drafted > 0, self._num_behind, 0).max())
        seconds = self._table.seconds(size, bucket, most, float(self._lengths[rows].mean()), behind)
        self._clock.pass_by(self._pending + seconds + self._costs.host)
        self._pending = 0.0
        self._num_behind = np.where(drafted > 0, 0, self._num_behind + emitted).astype(np.int32)
        self._positions += emitted
        self._lengths += emitted
        tokens = np.zeros((size, bucket + 1), np.int32)
        logprobs = np.zeros(tokens.shape, np.float32)
        counts: Any = (is_active, tokens, emitted, accepted, drafted, logprobs, finish)
        self._plan((is_active, drafted, accepted, emitted), finish)
        self._handles = [
            handle if finish[row] == FinishReason.RUNNING else None for row, handle in enumerate(self._handles)
        ]
        return StepResult(StepInfo(*counts), bucket)

    def _plan(self, counts: tuple, finish: np.ndarray) -> None:
        size = len(self._handles)
        if size not in self._constant:
            self._constant[size] = constant_plan(self._policy, size)
        constant = self._constant[size]
        if constant is not None:
            room = np.where(finish == FinishReason.RUNNING, self._limits - self._lengths - 1, 0)
            self._draft_lens = np.full(size, constant, np.int32)
            self._wanted = np.array([min(constant, int(room.max())), constant], np.int32)
            return
        rows = (self._lengths, self._limits, finish, self._draft_lens)
        self._policy_state, plan, wanted = _plan_rows(
            self._policy, self._policy_state, rows, counts, np.float32(np.nan)
        )
        if plan.min_confidence is not None:
            raise ValueError(f"policy {self._policy!r}: it looks at the draft's probabilities, which are not simulated")
        self._draft_lens, self._wanted = np.array(plan.draft_lens), np.asarray(wanted)
