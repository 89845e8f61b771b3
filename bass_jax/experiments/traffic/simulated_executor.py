"""The executor of a simulated device: it counts tokens as the decoder does, and a cost model gives the times."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bass_jax.config import draft_len_bucket
from bass_jax.decoding.policy_runner import StepTimes, no_times
from bass_jax.decoding.state import FinishReason, StepInfo
from bass_jax.engine import EngineConfig, Request, RequestHandle
from bass_jax.engine.executor import StepResult
from bass_jax.engine.planner import Planner, plan_rows, with_joined
from bass_jax.experiments.traffic.drive import SimulatedClock
from bass_jax.experiments.traffic.serving_costs import ServingCosts, StepTable, context_grid
from bass_jax.policies import Policy
from bass_jax.policies.protocol import plan_bucket, policy_buckets


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedRequest(Request):
    """A request whose output is known.

    Attributes:
        num_tokens: length of the output.
        acceptable: ``[num_tokens]`` int, drafts that are accepted from each position on.
    """

    num_tokens: int
    acceptable: np.ndarray


def constant_plan(policy: Policy, num_rows: int) -> int | None:
    """Returns the draft length that `policy` always plans for all rows of such a batch; None if it can change.

    A policy without state whose plan does not depend on its inputs has a constant plan. Its update is then skipped,
    because it takes most of the time of a simulated step.
    """
    if jax.tree.leaves(policy.init(num_rows)):
        return None

    def plan(rows, counts):
        return plan_rows(policy, policy.init(num_rows), is_new, rows, counts, no_times(policy))[1]

    zeros = np.zeros(num_rows, np.int32)
    is_new: Any = zeros.astype(bool)
    arguments = (zeros,) * 4, (zeros.astype(bool), zeros, zeros, zeros)
    traced = jax.make_jaxpr(plan)(*arguments).jaxpr
    dependent = set(map(id, traced.invars))
    for equation in traced.eqns:
        if any(id(value) in dependent for value in equation.invars):
            dependent |= set(map(id, equation.outvars))
    if any(id(value) in dependent for value in traced.outvars):
        return None
    constant = plan(*arguments)
    lengths = np.asarray(constant.draft_lens)
    return int(lengths[0]) if constant.min_confidence is None and (lengths == lengths[0]).all() else None


class SimulatedExecutor:
    """An executor whose rows are counts. The policy and its rules are the decoder's own code."""

    def __init__(self, policy: Policy, costs: ServingCosts, config: EngineConfig, clock: SimulatedClock):
        """Starts with free rows.

        Raises:
            ValueError: if the policy depends on the drafts' confidence, which is not simulated.
        """
        self._policy, self._costs, self._clock = policy, costs, clock
        self._is_refilled = np.asarray(config.batching == "continuous")
        self._buckets = policy_buckets(policy)
        self._table = StepTable(costs.steps, config, self._buckets)
        self._contexts = context_grid(config.capacity)
        size = config.sizes[0]
        self._handles: list[RequestHandle | None] = [None] * size
        self._rows = {name: np.zeros(size, np.int32) for name in ("positions", "num_behind", "draft_lens")}
        self._rows |= {name: np.ones(size, np.int32) for name in ("lengths", "limits")}
        self._planner = Planner(policy, size)
        self._wanted = np.zeros(2, np.int32)
        self._pending = 0.0
        self._constant_plans: dict[int, int | None] = {}
        zeros = np.zeros(size, np.int32)
        self._plan((zeros.astype(bool), zeros, zeros, zeros), zeros + FinishReason.INACTIVE)

    def read(self, handle: RequestHandle, start: int, num: int) -> None:
        """Adds the time of reading a chunk."""
        del handle
        if num:
            self._pending += float(np.interp(start, self._contexts, self._costs.chunk))

    def insert(self, handle: RequestHandle, row: int) -> None:
        """Starts a request in `row`."""
        self._handles[row] = handle
        rows, request = self._rows, handle.request
        rows["lengths"][row], rows["limits"][row] = len(request.prompt), request.limit
        rows["positions"][row], rows["num_behind"][row] = 0, 0
        rows["draft_lens"][row] = rows["draft_lens"].max()
        self._planner.insert(row)
        self._wanted = with_joined(self._wanted, request.max_new_tokens - 1)
        self._pending += self._costs.insert

    def regroup(self, sources: Sequence[int]) -> None:
        """Moves rows into a batch of another size."""
        self._pending += self._costs.regroup[len(self._handles), len(sources)]
        rows = np.maximum(sources, 0)
        self._handles = [None if source < 0 else self._handles[source] for source in sources]
        self._rows = {name: values[rows] for name, values in self._rows.items()}
        self._planner.regroup(rows)

    def stop(self, row: int) -> None:
        """Frees a row."""
        self._handles[row] = None

    def dispatch(self) -> None:
        """Does nothing: `collect` runs the step."""

    def can_run_ahead(self) -> bool:
        """Returns False: the costs contain the time of the host between two steps."""
        return False

    def discard(self) -> None:
        """Is not called, because no step runs ahead."""

    def collect(self) -> StepResult:
        """Counts a step, and advances the clock by its time."""
        size, rows = len(self._handles), self._rows
        is_active = np.array([handle is not None for handle in self._handles])
        active = np.flatnonzero(is_active)
        bucket = plan_bucket(self._buckets, int(self._wanted[0]))
        most = np.clip(np.minimum(rows["draft_lens"], rows["limits"] - rows["lengths"] - 1), 0, bucket)
        drafted = np.where(is_active, most, 0).astype(np.int32)
        accepted, emitted = np.zeros(size, np.int32), np.zeros(size, np.int32)
        finish = np.full(size, FinishReason.INACTIVE, np.int32)
        for row in active.tolist():
            request: Any = self._handles[row].request  # type: ignore[union-attr]
            position = rows["positions"][row]
            accepted[row] = min(request.acceptable[position], drafted[row])
            emitted[row] = min(accepted[row] + 1, request.num_tokens - position)
            if position + emitted[row] < request.num_tokens:
                finish[row] = FinishReason.RUNNING
            else:
                is_stopped = request.num_tokens < request.max_new_tokens
                finish[row] = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        num_behind = int(np.where(drafted > 0, rows["num_behind"], 0).max())
        context = float(rows["lengths"][active].mean())
        seconds = self._table.seconds(size, bucket, int(drafted.max()), context, num_behind)
        self._clock.advance(self._pending + seconds + self._costs.host)
        self._pending = 0.0
        rows["num_behind"] = np.where(drafted > 0, 0, rows["num_behind"] + emitted).astype(np.int32)
        rows["positions"] += emitted
        rows["lengths"] += emitted
        tokens = np.zeros((size, bucket + 1), np.int32)
        info: Any = (is_active, tokens, emitted, accepted, drafted, np.zeros(tokens.shape, np.float32), finish)
        self._plan((is_active, drafted, accepted, emitted), finish)
        self._handles = [
            handle if finish[row] == FinishReason.RUNNING else None for row, handle in enumerate(self._handles)
        ]
        return StepResult(StepInfo(*info), bucket)

    def _plan(self, counts: tuple, finish: np.ndarray) -> None:
        size, rows = len(self._handles), self._rows
        if size not in self._constant_plans:
            self._constant_plans[size] = constant_plan(self._policy, size)
        constant = self._constant_plans[size]
        if constant is not None:
            room = np.where(finish == FinishReason.RUNNING, rows["limits"] - rows["lengths"] - 1, 0)
            rows["draft_lens"] = np.full(size, constant, np.int32)
            self._wanted = np.array([min(constant, int(room.max())), constant], np.int32)
            return
        state = (rows["lengths"], rows["limits"], finish, rows["draft_lens"])
        plan, self._wanted = self._planner.plan(state, counts, self._times(finish == FinishReason.RUNNING))
        if plan.min_confidence is not None:
            raise ValueError(f"policy {self._policy!r}: it depends on the drafts' confidence, which is not simulated")
        rows["draft_lens"] = np.array(plan.draft_lens)

    def _times(self, is_running: np.ndarray) -> StepTimes:
        """Returns the times that an executor with a clock would measure."""
        size, rows = len(self._handles), self._rows
        context = float(rows["lengths"][is_running].mean()) if is_running.any() else 0.0
        buckets = [(draft_len_bucket(length), length) for length in self._policy.lengths]
        times = [self._table.seconds(size, bucket, length, context, 0) for bucket, length in buckets]
        bucket, length = buckets[-1]
        behind = int(rows["num_behind"].max())
        resumed = self._table.seconds(size, bucket, length, context, behind) - times[-1]
        is_compiled = np.ones(len(times), bool)
        return StepTimes(np.asarray(times, np.float32), is_compiled, np.asarray(resumed, np.float32), self._is_refilled)
