"""Runs a policy after a step: the counts of the step become the draft lengths of the next."""

from typing import Any

import jax.numpy as jnp

from bass_jax.decoding.state import FinishReason, SpecState, StepInfo
from bass_jax.policies.protocol import Plan, Policy, PolicyStats, checked_plan
from bass_jax.typing import Array


def no_step(num_rows: int) -> StepInfo:
    """What is known before the first step: no row was active."""
    zeros = jnp.zeros(num_rows, jnp.int32)
    empty = jnp.zeros((num_rows, 0), jnp.int32)
    return StepInfo(zeros.astype(bool), empty, zeros, zeros, zeros, empty.astype(jnp.float32), zeros)


def advance_policy(
    policy: Policy, policy_state: Any, state: SpecState, info: StepInfo, seconds: Array | float
) -> tuple[Any, SpecState, Array]:
    """Updates `policy` after a step, and writes its plan into `state`.

    Args:
        policy: the policy.
        policy_state: its state.
        state: after the step.
        info: of the step; `no_step` before the first.
        seconds: wall time of the step before this one; 0 if not known yet, NaN where there is no clock.

    Returns:
        ``(policy_state, state, num_wanted)``; `num_wanted`, ``[]`` int32, is the most drafts that a row will draft
        in the next step, the token limits taken into account: its bucket is the one to run.
    """
    policy_state, plan, num_wanted = advance_rows(policy, policy_state, rows_of(state), counts_of(info), seconds)
    return policy_state, planned(state, plan), num_wanted


def rows_of(state: SpecState) -> tuple[Array, ...]:
    """The parts of a state that a plan depends on."""
    return state.lengths, state.limits, state.finish, state.draft_lens


def counts_of(info: StepInfo) -> tuple[Array, ...]:
    """The counts of a step: the same shapes whatever its bucket."""
    return info.is_active, info.num_drafted, info.num_accepted, info.num_emitted


def planned(state: SpecState, plan: Plan) -> SpecState:
    """Writes `plan` into `state`."""
    return state._replace(draft_lens=plan.draft_lens, min_confidence=plan.min_confidence)


def advance_rows(policy: Policy, policy_state: Any, rows, counts, seconds) -> tuple[Any, Plan, Array]:
    """Updates `policy` from `rows_of` a state and `counts_of` the step that made it; see `advance_policy`."""
    lengths, limits, finish, num_wanted = rows
    is_active, num_drafted, num_accepted, num_emitted = counts
    is_running = finish == FinishReason.RUNNING
    room_before = limits - (lengths - num_emitted)
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
        seconds=jnp.asarray(seconds, jnp.float32),
    )
    policy_state, plan = policy.update(policy_state, stats)
    plan = checked_plan(policy, plan, lengths.shape[0])
    wanted = jnp.where(is_running, jnp.minimum(plan.draft_lens, limits - lengths - 1), 0)
    return policy_state, plan, wanted.max()
