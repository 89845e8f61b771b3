"""Each step the length that promises to be done first."""

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
    """What was seen, forgetting the old. An outcome is 1 if all drafts of a step stood, or there were none; else 0."""

    reached: Array  # [2, P] float32, how often the draft at each position was evaluated, by the outcome before it
    stood: Array  # [2, P] float32, how often it was accepted
    outcome: Array  # [B] int32, 0 or 1, of the row's last step
    row_expected: Array  # [B] float32, drafts of the row that should have been accepted
    row_accepted: Array  # [B] float32, drafts of the row that were
    num_behind: Array  # [] int32, tokens of the row where the drafter has most to catch up with
    budget: Array  # [] float32, seconds that may be spent on a probe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Goodput:
    """The length with which the batch is expected to be done first, or to emit fastest; no drafts included.

    Acceptance is estimated per position, by whether the row's last drafts all stood: text that was hard stays hard for
    a while. A length's mean comes from the steps that it would itself lead to, since short drafts end at a refusal less
    often than long ones, and what is seen with one length is no measure of another. Little is needed to move an
    estimate away from the prior, scaled by how the other positions compare with theirs.

    A batch lasts as long as its slowest row. So what counts is the expected maximum, over the rows, of the steps to the
    row's token limit: normal, with the variance of the counts and of the row's own acceptance, which is learned too.
    Where rows are replaced as they end (``objective="rate"``) it is the tokens per second of all.

    Acceptance can only be estimated from steps that draft. So `exploration_share` of the time may go to exploration
    steps, which draft where it does not pay. Half of it, counted from the time that the batch would take without
    drafts, is lent at the start, and half is saved up. A probe takes the best length and reads all the drafter has to
    catch up with. Its price is what it puts the batch's end off by: tokens of rows that are not the slowest pay for
    nothing. Once reading the committed tokens alone takes a drafter more than is saved meanwhile, there are no more
    probes. What catching up costs is spread over the steps that are still to come.

    Attributes:
        cost: of the pair on this device.
        prior: ``[P]`` float32, acceptance by position.
        prior_weight: how many drafts the prior counts as, at each position.
        row_weight: how many accepted drafts the batch's estimate counts as, for a row.
        decay: of what was seen, per step.
        margin: share by which drafting must promise more than not drafting: a model errs.
        exploration_share: share of the time that is spent on probes.
        lengths: static, to choose from; ascending.
        objective: static. ``"finish"``, soonest for this batch; ``"rate"``, most tokens per second.

    Source: the objective ``"rate"`` is that of Liu et al. 2024 (SmartSpec, arXiv 2406.14066); the other, estimates and
    probes are ours.
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
        """Has seen nothing."""
        seen = jnp.zeros((2, self.prior.shape[0]), jnp.float32)
        row = jnp.zeros(num_rows, jnp.float32)
        return GoodputState(seen, seen, row.astype(jnp.int32), row, row, jnp.int32(0), jnp.float32(0.0))

    def update(self, state: GoodputState, stats: PolicyStats) -> tuple[GoodputState, Plan]:
        """Counts the step's drafts and takes the best length."""
        state = self._observed(state, stats)
        num_rows, running = stats.lengths.shape[0], stats.is_running
        context = jnp.where(running, stats.lengths, 0).sum() / jnp.maximum(running.sum(), 1)
        candidates = jnp.asarray(self.lengths, jnp.int32)

        emitted, variance = self._counts(state, stats)  # [B, lengths]
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
        # Both objectives: the seconds in which the same tokens are there.
        seconds_to_end = seconds * num_steps

        drafts = candidates > 0
        best = jnp.argmin(jnp.where(drafts, seconds_to_end, jnp.inf))
        without = jnp.where(drafts, jnp.inf, seconds_to_end).min()  # inf, if 0 is not among the lengths
        cautious = jnp.where(jnp.isfinite(without), 1 + self.margin, 1.0)
        does_pay = cautious * seconds_to_end[best] < without
        # A probe costs what its step takes beyond the time by which it brings the end nearer: where drafting does not
        # pay, never less than nothing.
        regular = jnp.where(drafts, -jnp.inf, steady).max()
        exploration = cautious * (steady + catch_up)[best] - without / num_steps[best]
        # What is learned first serves longest: half of what may be spent is lent at the start, half is saved up.
        lent = jnp.where(jnp.isfinite(without), without, 0.0)
        saved = jnp.where(does_pay, 0.0, jnp.maximum(regular, 0.0))
        budget = state.budget + self.exploration_share / 2 * jnp.where(stats.is_active.any(), saved, lent)
        is_exploration = ~does_pay & (budget >= exploration)
        draft_len = jnp.where(does_pay | is_exploration, candidates[best], candidates[0])
        budget = (budget - jnp.where(is_exploration, jnp.maximum(exploration, 0.0), 0.0)).astype(jnp.float32)
        return state._replace(budget=budget), all_rows(stats, draft_len)

    def rates(self, state: GoodputState) -> Array:
        """``[2, P]``: the estimated acceptance by the outcome before and by position."""
        prior = self._nearer(self.prior, state.reached.sum(axis=0), state.stood.sum(axis=0))
        return jax.vmap(self._nearer, in_axes=(None, 0, 0))(prior, state.reached, state.stood)

    def _nearer(self, prior: Array, reached: Array, stood: Array) -> Array:
        """``[P]``: the prior, scaled to what was seen of all positions, then moved to what was seen of each."""
        weight = self.prior_weight
        quality = (weight + stood.sum()) / (weight + (prior * reached).sum())
        return (weight * jnp.clip(prior * quality, 0.0, 1.0) + stood) / (weight + reached)

    def _counts(self, state: GoodputState, stats: PolicyStats) -> tuple[Array, Array]:
        """Mean and variance of a row's emitted tokens per step, ``[B, lengths]``, were it to draft so all the time."""
        quality = (self.row_weight + state.row_accepted) / (self.row_weight + state.row_expected)
        rates = jnp.clip(quality[:, None, None] * self.rates(state), 0.0, 1.0)
        survival = jnp.cumprod(jnp.pad(rates, ((0, 0), (0, 0), (1, 0)), constant_values=1.0), axis=2)  # [B, 2, P + 1]
        odd = 2.0 * jnp.arange(survival.shape[2]) + 1
        moments = jnp.stack([survival, jnp.cumsum(survival, axis=2), jnp.cumsum(odd * survival, axis=2)])
        usable = jnp.clip(jnp.minimum(jnp.asarray(self.lengths, jnp.int32), stats.room[:, None] - 1), 0)
        full, mean, square = jnp.take_along_axis(moments, usable[None, :, None, :], axis=3)  # each [B, 2, lengths]
        # How often a step follows one whose drafts all stood: the equilibrium of a chain of two states.
        share = full[:, 0] / jnp.maximum(1 - full[:, 1] + full[:, 0], 1e-6)

        def mixed(values):
            return values[:, 0] + share * (values[:, 1] - values[:, 0])

        emitted = mixed(mean)
        of_count = jnp.maximum(mixed(square) - emitted**2, 0.0)
        # Of the number of steps, the row's unknown quality is a share; as a variance of the count it grows with them.
        of_quality = (
            (emitted - 1) ** 2 * stats.room[:, None] / emitted / (self.row_weight + state.row_accepted)[:, None]
        )
        return emitted, of_count + of_quality

    def _observed(self, state: GoodputState, stats: PolicyStats) -> GoodputState:
        positions = jnp.arange(self.prior.shape[0])
        is_reached = (positions < stats.num_drafted[:, None]) & (positions <= stats.num_accepted[:, None])
        is_reached &= stats.is_active[:, None]
        was_accepted = is_reached & (positions < stats.num_accepted[:, None])
        has_drafted = (stats.num_drafted > 0).any()
        emitted = jnp.where(stats.is_active, stats.num_emitted, 0).max()
        # Time passes in steps that drafted; a probe's news is kept until the next.
        decay = jnp.where(has_drafted, self.decay, 1.0)
        expected = jnp.where(is_reached, self.rates(state)[state.outcome], 0.0).sum(axis=1)
        by_outcome = jax.nn.one_hot(state.outcome, 2)
        outcome = (stats.num_accepted >= stats.num_drafted).astype(jnp.int32)
        return GoodputState(
            reached=decay * state.reached + jnp.einsum("bo,bp->op", by_outcome, is_reached.astype(jnp.float32)),
            stood=decay * state.stood + jnp.einsum("bo,bp->op", by_outcome, was_accepted.astype(jnp.float32)),
            outcome=jnp.where(stats.is_active, outcome, state.outcome),
            row_expected=decay * state.row_expected + expected,
            row_accepted=decay * state.row_accepted + was_accepted.sum(axis=1),
            num_behind=jnp.where(has_drafted, 0, state.num_behind + emitted).astype(jnp.int32),
            budget=state.budget,
        )


def expected_max(mean: Array, variance: Array, is_counted: Array, num_points: int = 32) -> Array:
    """Expected largest of independent normal variables, by the midpoint rule.

    Args:
        mean: ``[B, N]``.
        variance: ``[B, N]``.
        is_counted: ``[B]`` bool; others are left out.
        num_points: of the rule.

    Returns:
        ``[N]``: a maximum per column, -inf where nothing is counted.
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
    """Makes the policy from a profile.

    Args:
        profile: of the pair on this device, or its file.
        cost: with `rates`, in place of a profile.
        rates: acceptance by position; the last serves those after it.
        lengths: to choose from.
        settings: attributes of `Goodput`.

    Raises:
        ValueError: if there is no profile and no cost, no length, or an unknown objective.
    """
    objective = settings.get("objective", "finish")
    if objective not in ("finish", "rate"):
        raise ValueError(f"objective={objective!r}: expected 'finish' or 'rate'")
    cost, rates = cost_and_rates("goodput", profile, cost, rates)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths={lengths}: expected ascending ones")
    prior = [*rates] + [rates[-1]] * (lengths[-1] - len(rates))
    return Goodput(cost, jnp.asarray(prior, jnp.float32), lengths=tuple(lengths), **settings)


register_policy("goodput", goodput)
