"""Chooses the draft length by estimated costs and acceptance rates."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.cost_model import CostModel, Profile, step_seconds
from bass_jax.cost_model.protocol import Leaf
from bass_jax.policies.batch_table import LENGTHS, cost_and_rates
from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.typing import Array


class GoodputState(NamedTuple):
    """Exponentially decayed counts. The outcome of a step is 1 if all of its drafts were accepted, otherwise 0."""

    reached: Array  # [2, P] float32, drafts that were tested, by the outcome of the previous step and by position
    accepted: Array  # [2, P] float32, those that were accepted
    outcome: Array  # [B] int32, 0 or 1, of the row's last step
    row_expected: Array  # [B] float32, accepted drafts of the row that the estimates predicted
    row_accepted: Array  # [B] float32, accepted drafts of the row
    num_behind: Array  # [] int32, largest number of tokens that the drafter has not read in a row
    budget: Array  # [] float32, seconds that may be spent on exploration steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Goodput:
    """Chooses the length with the shortest expected time to the end of the batch, or the most tokens per second.

    The policy combines five parts:

    * **Acceptance rates** are estimated by position and by whether the row's previous step accepted all drafts. A
      length is rated as if it were used in all steps. The estimates start from a prior and move with the counts.
    * **Objective.** With ``"finish"``, the expected number of steps of the slowest row is minimized times the seconds
      of a step. The steps of a row are taken as normally distributed. With ``"rate"``, where rows are replaced when
      they finish, the tokens per second of all rows are maximized.
    * **Margin.** Drafting has to be better than regular decoding by `margin`, because cost models have errors.
    * **Exploration.** Acceptance can only be estimated from steps that draft. While drafting is off, the policy
      therefore spends up to `exploration_share` of the time on exploration steps. Half of this budget, based on the
      time without drafts, is available at the start. The other half accumulates during steps without drafts. The cost
      of an exploration step is the time by which it delays the end of the batch.
    * **Catching up.** After steps without drafts the drafter has to read tokens. This cost is spread over the remaining
      steps. Exploration stops once reading takes more time than the budget gains.

    Attributes:
        cost: cost model of the pair on this device.
        prior: ``[P]`` float32, acceptance rate by position.
        prior_weight: number of drafts that the prior counts as, at each position.
        row_weight: number of accepted drafts that the batch's estimate counts as, for one row.
        decay: factor of the counts per step.
        margin: see above; a fraction.
        exploration_share: see above; a fraction.
        lengths: draft lengths to choose from; static, ascending.
        objective: ``"finish"`` or ``"rate"``; static.

    Source: the objective ``"rate"`` is from Liu et al. 2024 (SmartSpec, arXiv 2406.14066).
    """

    cost: Leaf
    prior: Leaf
    prior_weight: Leaf = 4.0
    row_weight: Leaf = 8.0
    decay: Leaf = 0.98
    margin: Leaf = 0.02
    exploration_share: Leaf = 0.02
    lengths: tuple[int, ...] = dataclasses.field(default=LENGTHS, metadata={"static": True})
    objective: Literal["finish", "rate"] = dataclasses.field(default="finish", metadata={"static": True})

    def init(self, num_rows: int) -> GoodputState:
        """Returns counts of 0."""
        seen = jnp.zeros((2, self.prior.shape[0]), jnp.float32)
        row = jnp.zeros(num_rows, jnp.float32)
        return GoodputState(seen, seen, row.astype(jnp.int32), row, row, jnp.int32(0), jnp.float32(0.0))

    def update(self, state: GoodputState, stats: PolicyStats) -> tuple[GoodputState, Plan]:
        """Counts the step's drafts and plans the best length."""
        state = self._count_step(state, stats)
        num_rows, running = stats.lengths.shape[0], stats.is_running
        context = jnp.where(running, stats.lengths, 0).sum() / jnp.maximum(running.sum(), 1)
        candidates = jnp.asarray(self.lengths, jnp.int32)

        emitted, variance = self._emitted_per_step(state, stats)  # [B, lengths]
        steady = step_seconds(self.cost, num_rows, candidates, context)
        catch_up = step_seconds(self.cost, num_rows, candidates, context, state.num_behind) - steady
        room = jnp.where(running, stats.room, 0)[:, None]
        num_steps = room / emitted
        if self.objective == "finish":
            num_steps = jnp.maximum(expected_max(num_steps, room * variance / emitted**3, running), 1.0)
        else:
            total = jnp.where(running[:, None], emitted, 0.0).sum(axis=0)
            num_steps = jnp.maximum(room.sum() / jnp.maximum(total, 1e-6), 1.0)
        seconds = steady + catch_up / num_steps
        # For both objectives, the seconds that the remaining tokens take.
        seconds_to_end = seconds * num_steps

        drafts = candidates > 0
        best = jnp.argmin(jnp.where(drafts, seconds_to_end, jnp.inf))
        without = jnp.where(drafts, jnp.inf, seconds_to_end).min()  # inf if 0 is not among the lengths
        required_gain = jnp.where(jnp.isfinite(without), 1 + self.margin, 1.0)
        is_faster = required_gain * seconds_to_end[best] < without
        # The cost of an exploration step is its time, less the time that it saves later.
        regular = jnp.where(drafts, -jnp.inf, steady).max()
        exploration = required_gain * (steady + catch_up)[best] - without / num_steps[best]
        # Early estimates are used for more steps, so half of the budget is available at the start.
        initial = jnp.where(jnp.isfinite(without), without, 0.0)
        saved = jnp.where(is_faster, 0.0, jnp.maximum(regular, 0.0))
        budget = state.budget + self.exploration_share / 2 * jnp.where(stats.is_active.any(), saved, initial)
        is_exploration = ~is_faster & (budget >= exploration)
        draft_len = jnp.where(is_faster | is_exploration, candidates[best], candidates[0])
        budget = (budget - jnp.where(is_exploration, jnp.maximum(exploration, 0.0), 0.0)).astype(jnp.float32)
        return state._replace(budget=budget), all_rows(stats, draft_len)

    def rates(self, state: GoodputState) -> Array:
        """Returns the estimated acceptance rates ``[2, P]``, by the outcome of the previous step and by position."""
        prior = self._estimate(self.prior, state.reached.sum(axis=0), state.accepted.sum(axis=0))
        return jax.vmap(self._estimate, in_axes=(None, 0, 0))(prior, state.reached, state.accepted)

    def _estimate(self, prior: Array, reached: Array, accepted: Array) -> Array:
        """Returns rates ``[P]``: scales the prior to the counts of all positions, then adds each position's counts."""
        weight = self.prior_weight
        quality = (weight + accepted.sum()) / (weight + (prior * reached).sum())
        return (weight * jnp.clip(prior * quality, 0.0, 1.0) + accepted) / (weight + reached)

    def _emitted_per_step(self, state: GoodputState, stats: PolicyStats) -> tuple[Array, Array]:
        """Returns mean and variance of the tokens that a row emits per step at each length, ``[B, lengths]``."""
        quality = (self.row_weight + state.row_accepted) / (self.row_weight + state.row_expected)
        rates = jnp.clip(quality[:, None, None] * self.rates(state), 0.0, 1.0)
        survival = jnp.cumprod(jnp.pad(rates, ((0, 0), (0, 0), (1, 0)), constant_values=1.0), axis=2)  # [B, 2, P + 1]
        odd = 2.0 * jnp.arange(survival.shape[2]) + 1
        moments = jnp.stack([survival, jnp.cumsum(survival, axis=2), jnp.cumsum(odd * survival, axis=2)])
        usable = jnp.clip(jnp.minimum(jnp.asarray(self.lengths, jnp.int32), stats.room[:, None] - 1), 0)
        full, mean, square = jnp.take_along_axis(moments, usable[None, :, None, :], axis=3)  # each [B, 2, lengths]
        # The share of steps whose previous step had outcome 1, in the stationary distribution of a two-state chain.
        share = full[:, 0] / jnp.maximum(1 - full[:, 1] + full[:, 0], 1e-6)

        def mixed(values):
            return values[:, 0] + share * (values[:, 1] - values[:, 0])

        emitted = mixed(mean)
        of_count = jnp.maximum(mixed(square) - emitted**2, 0.0)
        # The error of the row's estimate is the same in all steps, so its variance grows with their number.
        of_quality = (
            (emitted - 1) ** 2 * stats.room[:, None] / emitted / (self.row_weight + state.row_accepted)[:, None]
        )
        return emitted, of_count + of_quality

    def _count_step(self, state: GoodputState, stats: PolicyStats) -> GoodputState:
        positions = jnp.arange(self.prior.shape[0])
        is_reached = (positions < stats.num_drafted[:, None]) & (positions <= stats.num_accepted[:, None])
        is_reached &= stats.is_active[:, None]
        was_accepted = is_reached & (positions < stats.num_accepted[:, None])
        has_drafted = (stats.num_drafted > 0).any()
        emitted = jnp.where(stats.is_active, stats.num_emitted, 0).max()
        # Counts decay only in steps with drafts, so that an exploration step counts until the next one.
        decay = jnp.where(has_drafted, self.decay, 1.0)
        expected = jnp.where(is_reached, self.rates(state)[state.outcome], 0.0).sum(axis=1)
        by_outcome = jax.nn.one_hot(state.outcome, 2)
        outcome = (stats.num_accepted >= stats.num_drafted).astype(jnp.int32)
        return GoodputState(
            reached=decay * state.reached + jnp.einsum("bo,bp->op", by_outcome, is_reached.astype(jnp.float32)),
            accepted=decay * state.accepted + jnp.einsum("bo,bp->op", by_outcome, was_accepted.astype(jnp.float32)),
            outcome=jnp.where(stats.is_active, outcome, state.outcome),
            row_expected=decay * state.row_expected + expected,
            row_accepted=decay * state.row_accepted + was_accepted.sum(axis=1),
            num_behind=jnp.where(has_drafted, 0, state.num_behind + emitted).astype(jnp.int32),
            budget=state.budget,
        )


def expected_max(mean: Array, variance: Array, is_counted: Array, num_points: int = 32) -> Array:
    """Returns the expected maximum over rows of independent normal variables, by the midpoint rule.

    Args:
        mean: ``[B, N]``.
        variance: ``[B, N]``.
        is_counted: ``[B]`` bool; other rows are ignored.
        num_points: number of points of the rule.

    Returns:
        ``[N]``; -inf if no row is counted.
    """
    deviation = jnp.sqrt(variance) + 1e-3
    low = jnp.where(is_counted[:, None], mean - 4 * deviation, -jnp.inf).max(axis=0)
    high = jnp.where(is_counted[:, None], mean + 4 * deviation, -jnp.inf).max(axis=0)
    points = low + (high - low) * ((jnp.arange(num_points) + 0.5) / num_points)[:, None]  # [points, N]
    below = jax.scipy.stats.norm.logcdf((points[:, None] - mean) / deviation)
    is_above = 1 - jnp.exp(jnp.where(is_counted[:, None], below, 0.0).sum(axis=1))
    return low + is_above.mean(axis=0) * (high - low)


def goodput(
    *,
    profile: Profile | str | Path | None = None,
    cost: CostModel | None = None,
    rates: Sequence[float] | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    **settings: Any,
) -> Goodput:
    """Makes the policy from a profile, or from costs and acceptance rates.

    Args:
        profile: a profile of the pair on this device, or its file.
        cost: with `rates`, instead of a profile.
        rates: acceptance rate by position; the last one is used for later positions.
        lengths: draft lengths to choose from.
        settings: other attributes of `Goodput`.

    Raises:
        ValueError: if no profile or cost is given, there is no length, or the objective is unknown.
    """
    objective = settings.get("objective", "finish")
    if objective not in ("finish", "rate"):
        raise ValueError(f"objective={objective!r}: expected 'finish' or 'rate'")
    cost, rates = cost_and_rates("goodput", profile, cost, rates)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths={lengths}: expected ascending draft lengths")
    prior = [*rates] + [rates[-1]] * (lengths[-1] - len(rates))
    return Goodput(cost, jnp.asarray(prior, jnp.float32), lengths=tuple(lengths), **settings)


register_policy("goodput", goodput)
