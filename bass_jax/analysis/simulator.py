"""Runs a policy on a recorded trace: the step counts of the decoder and the times of a cost model, without a model."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.analysis.replay import Replay
from bass_jax.config import batch_bucket, draft_len_bucket
from bass_jax.cost_model import CostModel, step_seconds
from bass_jax.decoding.policy_runner import no_times
from bass_jax.policies import Policy, PolicyStats, oracle
from bass_jax.policies.protocol import Plan, checked_plan, policy_buckets
from bass_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a policy over M batches.

    Attributes:
        seconds: ``[M]`` float64, of each batch.
        num_steps: ``[M]`` int32, of each batch.
        num_row_steps: the number of running rows, summed over the steps.
        num_drafted: draft tokens.
        num_accepted: accepted drafts.
        num_emitted: emitted tokens.
    """

    seconds: np.ndarray
    num_steps: np.ndarray
    num_row_steps: int
    num_drafted: int
    num_accepted: int
    num_emitted: int

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per row and target pass."""
        return self.num_emitted / self.num_row_steps

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, with one batch after the other."""
        return self.num_emitted / float(self.seconds.sum())


def compose(num_rows: int, batch: int, num_batches: int | None = None, seed: int = 0) -> np.ndarray:
    """Returns the rows of a trace that form each batch, ``[M, batch]`` int; -1 is a padding row.

    Args:
        num_rows: number of rows in the trace.
        batch: rows per batch.
        num_batches: M, the number of batches of random rows. By default each row is used once, in order.
        seed: of the random rows.

    Raises:
        ValueError: if a number is not positive.
    """
    if min(num_rows, batch, 1 if num_batches is None else num_batches) < 1:
        raise ValueError(f"num_rows={num_rows}, batch={batch}, num_batches={num_batches}: expected at least 1")
    if num_batches is None:
        return np.pad(np.arange(num_rows), (0, -num_rows % batch), constant_values=-1).reshape(-1, batch)
    return np.random.default_rng(seed).integers(0, num_rows, (num_batches, batch))


def simulate(replay: Replay, policy: Policy, cost: CostModel, batches: np.ndarray) -> Simulation:
    """Runs `policy` on every batch.

    The policy's own code runs under the rules of the decoder: draft-length buckets, token limits, and batches in which
    finished rows are still computed.

    Args:
        replay: of a trace.
        policy: any policy, including `bass_jax.policies.oracle`.
        cost: gives the time of each step.
        batches: ``[M, B]`` int, rows of the replay, from `compose`; -1 is a padding row.
    """
    return _total(_per_batch(replay, policy, cost, batches))


def _per_batch(replay: Replay, policy: Policy, cost: CostModel, batches: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the fields of a `Simulation`, each ``[M]``, for every batch by itself."""
    padding = batch_bucket(batches.shape[1]) - batches.shape[1]
    batches = np.pad(batches.astype(np.int32), ((0, 0), (0, padding)), constant_values=-1)
    arrays = tuple(jnp.asarray(field) for field in replay[:5])
    seconds, *counts = jax.device_get(_simulate(policy, cost, arrays, jnp.asarray(batches)))
    return np.asarray(seconds, np.float64), *counts


def _total(per_batch: Sequence[np.ndarray]) -> Simulation:
    seconds, num_steps, *counts = per_batch
    return Simulation(seconds, num_steps.astype(np.int32), *(int(count.sum()) for count in counts))


def regret(
    replay: Replay, policies: Mapping[str, Policy], cost: CostModel, batches: np.ndarray, lengths: Sequence[int]
) -> dict[str, tuple[Simulation, float]]:
    """Compares policies with an oracle, which is the fastest of all in hindsight, chosen for each batch.

    It chooses between the policies and `bass_jax.policies.oracle`, which knows the drafts that will be accepted but
    plans each step by itself. With several rows a fixed length can be faster than that policy, and never faster than
    this choice.

    Args:
        replay: of a trace.
        policies: by name.
        cost: gives the time of each step.
        batches: ``[M, B]`` int, from `compose`.
        lengths: draft lengths that the oracle can choose from.

    Returns:
        For each name, and ``"oracle"``: the simulation, and the relative time that it takes longer than the oracle,
        which is at least 0.
    """
    named = {"oracle": oracle(cost, tuple(lengths)), **policies}
    per_batch = {name: _per_batch(replay, policy, cost, batches) for name, policy in named.items()}
    fields = np.stack([np.stack(one) for one in per_batch.values()])  # [policies, fields, M] float64
    fastest = fields[fields[:, 0].argmin(axis=0), :, np.arange(fields.shape[2])]  # [M, fields]
    per_batch["oracle"] = tuple(fastest.T)
    found = {name: _total(one) for name, one in per_batch.items()}
    least = float(found["oracle"].seconds.sum())
    return {name: (one, float(one.seconds.sum()) / least - 1) for name, one in found.items()}


@jax.jit
def _simulate(policy: Policy, cost: CostModel, replay: tuple[Array, ...], batches: Array) -> tuple[Array, ...]:
    return jax.vmap(lambda rows: _one_batch(policy, cost, replay, rows))(batches)


def _one_batch(policy: Policy, cost: CostModel, replay: tuple[Array, ...], rows: Array) -> tuple[Array, ...]:
    acceptable, confidence, num_tokens, limits, prompt_lengths = (jnp.take(field, rows, axis=0) for field in replay)
    num_tokens = jnp.where(rows >= 0, num_tokens, 0)
    num_rows, longest = acceptable.shape
    buckets = jnp.asarray(policy_buckets(policy))

    def at_position(field, position):
        return field[jnp.arange(num_rows), jnp.minimum(position, longest - 1)]

    of_length = jnp.asarray([draft_len_bucket(length) for length in policy.lengths])
    unknown = no_times(policy)

    def stats_of(position, plan, counts, num_behind):
        is_active, num_drafted, num_accepted, num_emitted = counts
        room, is_running = limits - position, position < num_tokens
        context = jnp.where(is_running, prompt_lengths + position, 0).sum() / jnp.maximum(is_running.sum(), 1)
        times = unknown
        if getattr(policy, "use_clock", False):  # The cost model takes the place of the clock.
            resumed, usual = (cost.draft_seconds(num_rows, 1, context, behind) for behind in (num_behind.max(), 0))
            times = times._replace(
                step_seconds=step_seconds(cost, num_rows, of_length, context), resume_seconds=resumed - usual
            )
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
            **{name: jnp.asarray(value) for name, value in times._asdict().items()},
            num_acceptable=at_position(acceptable, position),
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
            is_below = at_position(confidence, position) < plan.min_confidence[:, None]
            num_confident = jnp.where(is_below.any(axis=1), jnp.argmax(is_below, axis=1), confidence.shape[2])
            drafted = jnp.minimum(wanted, num_confident)
            num_passes = jnp.minimum(wanted, drafted + 1)  # includes the pass whose confidence was too low
        accepted = jnp.minimum(at_position(acceptable, position), drafted)
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
    carry = (zeros, zeros, state, plan, totals)
    return jax.lax.while_loop(lambda carry: (carry[0] < num_tokens).any(), advance, carry)[-1]
