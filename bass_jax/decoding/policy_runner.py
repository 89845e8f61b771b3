"""Runs a draft-length policy after a step: the counts of the step determine the next draft lengths."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.decoding.state import FinishReason, SpecState, StepInfo
from bass_jax.policies.protocol import Plan, Policy, PolicyStats, checked_plan
from bass_jax.typing import Array


class StepTimes(NamedTuple):
    """What a host loop knows of the steps; NaN where nothing was measured."""

    step_seconds: Array | np.ndarray  # [A] float32, of a step with each of the policy's lengths
    is_compiled: Array | np.ndarray  # [A] bool, whether these steps are compiled
    resume_seconds: Array | np.ndarray  # [] float32, what a step with drafts takes longer after steps without
    is_refilled: Array | np.ndarray = np.zeros((), bool)  # [] bool, see `PolicyStats`
    num_steps: Array | np.ndarray = np.ones((), np.int32)  # [] int32, steps since the last plan


def no_times(policy: Policy) -> StepTimes:
    """Returns the times before anything is measured, and in loops without a clock."""
    num = len(policy.lengths)
    return StepTimes(np.full(num, np.nan, np.float32), np.ones(num, bool), np.full((), np.nan, np.float32))


def no_step(num_rows: int) -> StepInfo:
    """Returns the info that a policy receives before the first step: no row was active."""
    zeros, empty = np.zeros(num_rows, np.int32), np.zeros((num_rows, 0), np.int32)
    fields = zeros.astype(bool), empty, zeros, zeros, zeros, empty.astype(np.float32), zeros
    return StepInfo(*jax.device_put(fields))  # Unlike `jnp.zeros`, this compiles nothing.


def advance_policy(
    policy: Policy, policy_state: Any, state: SpecState, info: StepInfo, times: StepTimes | None = None
) -> tuple[Any, SpecState, Array]:
    """Updates `policy` after a step, and writes its plan into `state`.

    Args:
        policy: the policy.
        policy_state: its state.
        state: after the step.
        info: of the step; `no_step` before the first one.
        times: measured times of steps; None without a clock.

    Returns:
        ``(policy_state, state, num_wanted)``; `num_wanted`, ``[]`` int32, is the largest number of drafts that a row
        can use in the next step. The next step runs in its bucket.
    """
    policy_state, plan, num_wanted = advance_rows(policy, policy_state, rows_of(state), counts_of(info), times)
    return policy_state, with_plan(state, plan), num_wanted


def rows_of(state: SpecState) -> tuple[Array | np.ndarray, ...]:
    """Returns the parts of a state that a plan depends on."""
    return state.lengths, state.limits, state.finish, state.draft_lens


def counts_of(info: StepInfo) -> tuple[Array | np.ndarray, ...]:
    """Returns the counts of a step; their shapes do not depend on its bucket."""
    return info.is_active, info.num_drafted, info.num_accepted, info.num_emitted


def with_plan(state: SpecState, plan: Plan) -> SpecState:
    """Returns `state` with the draft lengths of `plan`."""
    return state._replace(draft_lens=plan.draft_lens, min_confidence=plan.min_confidence)


def advance_rows(policy: Policy, policy_state: Any, rows, counts, times: StepTimes | None) -> tuple[Any, Plan, Array]:
    """Updates `policy`, given `rows_of` a state and `counts_of` the step before it; see `advance_policy`."""
    lengths, limits, finish, num_wanted = rows
    is_active, num_drafted, num_accepted, num_emitted = counts
    is_running = finish == FinishReason.RUNNING
    room_before = limits - (lengths - num_emitted)
    times = no_times(policy) if times is None else times
    stats = PolicyStats(
        is_active=is_active,
        is_running=is_running,
        num_wanted=num_wanted,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_emitted=num_emitted,
        was_clipped=is_active & (num_wanted > room_before - 1),
        lengths=lengths,
        room=limits - lengths,
        **{name: jnp.asarray(value) for name, value in times._asdict().items()},
    )
    policy_state, plan = policy.update(policy_state, stats)
    plan = checked_plan(policy, plan, lengths.shape[0])
    wanted = jnp.where(is_running, jnp.minimum(plan.draft_lens, limits - lengths - 1), 0)
    return policy_state, plan, wanted.max()
