"""Replays a policy on a trace: the decoder's counts and a cost model's seconds, without a model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.analysis.replay import Replay
from bass_jax.config import batch_bucket, draft_len_bucket
from bass_jax.cost_model import CostModel, step_seconds
from bass_jax.policies import Policy, PolicyStats, oracle
from bass_jax.policies.protocol import Plan, checked_plan, policy_buckets
from bass_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a policy would have come to, over some batches.

    Attributes:
        seconds: ``[M]``, of each batch.
        num_steps: ``[M]``, of each batch.
        num_row_steps: target passes, counted per running row.
        num_drafted: draft tokens.
        num_accepted: of them.
        num_emitted: tokens.
    """

    seconds: np.ndarray
    num_steps: np.ndarray
    num_row_steps: int
    num_drafted: int
    num_accepted: int
    num_emitted: int

    @property
    def block_efficiency(self) -> float:
        """Mean tokens per target pass and row."""
        return self.num_emitted / self.num_row_steps

    @property
    def tokens_per_second(self) -> float:
        """Over all batches, one after the other."""
        return self.num_emitted / float(self.seconds.sum())


def compose(num_rows: int, batch: int, num_batches: int | None = None, seed: int = 0) -> np.ndarray:
    """Returns which rows of a trace make up each batch, ``[M, batch]``; -1 is no row.

    Args:
        num_rows: in the trace.
        batch: rows per batch.
        num_batches: M, rows drawn at random; by default every row once, in order.
        seed: of the draw.

    Raises:
        ValueError: if a number is not positive.
    """
    if min(num_rows, batch, 1 if num_batches is None else num_batches) < 1:
        raise ValueError(f"num_rows={num_rows}, batch={batch}, num_batches={num_batches}: expected at least 1")
    if num_batches is None:
        filled = np.full(-(-num_rows // batch) * batch, -1)
        filled[:num_rows] = np.arange(num_rows)
        return filled.reshape(-1, batch)
    random = np.random.default_rng(seed)
    return random.integers(0, num_rows, (num_batches, batch))


def simulate(replay: Replay, policy: Policy, cost: CostModel, batches: np.ndarray) -> Simulation:
    """Runs `policy` over every batch.

    The policy is the decoder's own code under the decoder's own rules: buckets, token limits, rows that finish at
    different times in a batch that is computed whole.

    Args:
        replay: of a trace.
        policy: any; `bass_jax.policies.oracle` too.
        cost: prices the steps.
        batches: ``[M, B]`` rows of the replay, from `compose`; -1 is no row.
    """
    batches = np.asarray(batches, np.int32)
    padding = batch_bucket(batches.shape[1]) - batches.shape[1]
    batches = np.pad(batches, ((0, 0), (0, padding)), constant_values=-1)
    arrays = tuple(jnp.asarray(field) for field in replay[:5])
    totals = jax.device_get(_simulate(policy, cost, arrays, jnp.asarray(batches)))
    seconds, num_steps, *counts = totals
    return Simulation(np.asarray(seconds, np.float64), num_steps, *(int(count.sum()) for count in counts))


def regret(
    replay: Replay, policies: Mapping[str, Policy], cost: CostModel, batches: np.ndarray, lengths: Sequence[int]
) -> dict[str, tuple[Simulation, float]]:
    """Runs every policy and the oracle.

    Args:
        replay: of a trace.
        policies: by name.
        cost: prices the steps.
        batches: from `compose`.
        lengths: that the oracle may choose from.

    Returns:
        By name, ``"oracle"`` included: the simulation, and by what share it takes longer than the oracle's.
    """
    named = {"oracle": oracle(cost, tuple(lengths)), **policies}
    found = {name: simulate(replay, policy, cost, batches) for name, policy in named.items()}
    least = float(found["oracle"].seconds.sum())
    return {name: (one, float(one.seconds.sum()) / least - 1) for name, one in found.items()}


@jax.jit
def _simulate(policy: Policy, cost: CostModel, replay: tuple[Array, ...], batches: Array) -> tuple[Array, ...]:
    return jax.vmap(lambda rows: _one_batch(policy, cost, replay, rows))(batches)


def _one_batch(policy: Policy, cost: CostModel, replay: tuple[Array, ...], rows: Array) -> tuple[Array, ...]:
    acceptable, confidence, num_tokens, limits, prompt_lengths = (jnp.take(field, rows, axis=0) for field in replay)
    is_row = rows >= 0
    num_tokens = jnp.where(is_row, num_tokens, 0)
    num_rows, longest = acceptable.shape
    buckets = jnp.asarray(policy_buckets(policy))
    slots = jnp.arange(confidence.shape[2])

    def at(field, position):
        return jnp.take_along_axis(field, jnp.minimum(position, longest - 1)[:, None], axis=1)[:, 0]

    of_length = jnp.asarray([draft_len_bucket(length) for length in policy.lengths])

    def stats_of(position, plan, counts, num_behind):
        is_active, num_drafted, num_accepted, num_emitted = counts
        room, is_running = limits - position, position < num_tokens
        context = jnp.where(is_running, prompt_lengths + position, 0).sum() / jnp.maximum(is_running.sum(), 1)
        resumed, usual = (cost.draft_seconds(num_rows, 1, context, behind) for behind in (num_behind.max(), 0))
        return PolicyStats(
            is_active=is_active,
            is_running=is_running,
            num_wanted=plan.draft_lens,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            num_emitted=num_emitted,
            was_clipped=is_active & (plan.draft_lens > room + num_emitted - 1),
            lengths=prompt_lengths + position,
            room=room,
            step_seconds=step_seconds(cost, num_rows, of_length, context),
            resume_seconds=resumed - usual,
            num_acceptable=at(acceptable, position),
        )

    def update(state, position, plan, counts, num_behind):
        state, plan = policy.update(state, stats_of(position, plan, counts, num_behind))
        return state, checked_plan(policy, plan, num_rows)

    def advance(carry):
        position, num_behind, state, plan, totals = carry
        is_active = position < num_tokens
        wanted = jnp.where(is_active, jnp.clip(jnp.minimum(plan.draft_lens, limits - position - 1), 0), 0)
        drafted, num_passes = wanted, wanted
        if plan.min_confidence is not None:
            here = confidence[jnp.arange(num_rows), jnp.minimum(position, longest - 1)]
            is_unsure = here < plan.min_confidence[:, None]
            sure = jnp.where(is_unsure.any(axis=1), jnp.argmax(is_unsure, axis=1), slots.size)
            drafted = jnp.minimum(wanted, sure)
            num_passes = jnp.minimum(wanted, drafted + 1)  # the pass that found it out was run
        accepted = jnp.minimum(at(acceptable, position), drafted)
        emitted = jnp.where(is_active, jnp.minimum(accepted + 1, num_tokens - position), 0)
        width = buckets[jnp.minimum(jnp.searchsorted(buckets, wanted.max()), buckets.size - 1)] + 1
        context = jnp.where(is_active, prompt_lengths + position, 0).sum() / jnp.maximum(is_active.sum(), 1)
        behind = jnp.where(wanted > 0, num_behind, 0).max()
        seconds = cost.target_seconds(num_rows, width, context)
        seconds += cost.draft_seconds(num_rows, num_passes.max(), context, behind)
        num_behind = jnp.where(wanted > 0, 0, num_behind + emitted)
        position = position + emitted
        counts = (is_active, drafted, accepted, emitted)
        state, plan = update(state, position, plan, counts, num_behind)
        gained = (seconds, 1, is_active.sum(), drafted.sum(), jnp.where(is_active, accepted, 0).sum(), emitted.sum())
        totals = tuple((total + one).astype(total.dtype) for total, one in zip(totals, gained, strict=True))
        return position, num_behind, state, plan, totals

    zeros = jnp.zeros(num_rows, jnp.int32)
    nothing = (zeros.astype(bool), zeros, zeros, zeros)
    state, plan = update(policy.init(num_rows), zeros, Plan(zeros), nothing, zeros)
    totals = (jnp.float32(0.0), *(jnp.int32(0) for _ in range(5)))
    carry: Any = (zeros, zeros, state, plan, totals)
    *_, totals = jax.lax.while_loop(lambda carry: (carry[0] < num_tokens).any(), advance, carry)
    return totals
