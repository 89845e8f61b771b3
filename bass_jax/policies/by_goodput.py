"""Each step the length that promises most tokens per second."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.costmodel import CostModel, Profile, expected_emitted, step_seconds
from bass_jax.costmodel.base import Leaf
from bass_jax.policies.base import Plan, PolicyStats, all_rows, register_policy
from bass_jax.policies.by_batch import LENGTHS, cost_and_rates
from bass_jax.typing import Array


class GoodputState(NamedTuple):
    """What was seen, forgetting the old."""

    reached: Array  # [P] float32, how often the draft at each position was judged
    stood: Array  # [P] float32, how often it was accepted
    num_behind: Array  # [] int32, tokens of the row where the drafter has most to catch up with
    budget: Array  # [] float32, seconds that may be spent on a probe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Goodput:
    """Maximises expected emitted tokens over modelled seconds, no drafts included.

    Acceptance is estimated per position from what was seen lately and a prior. Positions that were not reached lately
    follow the prior, scaled by how the others compare with it; so the first step has the prior's length already. No
    row is credited with more than its token limit leaves.

    Without drafts nothing is learnt. So time is saved up, `probe_share` of it, and once it pays for a step of the
    best length with all the drafter has to catch up with, that step is taken. Where reading the committed tokens alone
    takes a drafter more than that share, there are no probes. What catching up costs is spread over the steps that are
    still to come.

    Attributes:
        cost: of the pair on this device.
        prior: ``[P]`` float32, acceptance by position.
        prior_weight: how many drafts the prior counts as.
        decay: of what was seen, per step.
        margin: share by which drafting must promise more than not drafting: a model errs.
        probe_share: share of the time that is spent on probes.
        lengths: static, to choose from; ascending.

    Source: the objective is that of Liu et al. 2024 (SmartSpec, arXiv 2406.14066); estimates and probes are ours.
    """

    cost: Leaf
    prior: Leaf
    prior_weight: Leaf = 48.0
    decay: Leaf = 0.98
    margin: Leaf = 0.02
    probe_share: Leaf = 0.02
    lengths: tuple[int, ...] = dataclasses.field(default=LENGTHS, metadata={"static": True})

    def init(self, num_rows: int) -> GoodputState:
        """Has seen nothing."""
        del num_rows
        zeros = jnp.zeros(self.prior.shape[0], jnp.float32)
        return GoodputState(zeros, zeros, jnp.int32(0), jnp.float32(0.0))

    def update(self, state: GoodputState, stats: PolicyStats) -> tuple[GoodputState, Plan]:
        """Counts the step's drafts and takes the best length."""
        state = self._observed(state, stats)
        num_rows, running = stats.lengths.shape[0], stats.is_running
        num_running = jnp.maximum(running.sum(), 1)
        context = jnp.where(running, stats.lengths, 0).sum() / num_running
        candidates = jnp.asarray(self.lengths, jnp.int32)

        usable = jnp.clip(jnp.minimum(candidates[:, None], stats.room - 1), 0)  # [lengths, B]
        emitted = jnp.where(running, expected_emitted(self.rates(state), usable), 0.0).sum(axis=1)
        steady = step_seconds(self.cost, num_rows, candidates, context)
        catch_up = step_seconds(self.cost, num_rows, candidates, context, state.num_behind) - steady
        mean_room = jnp.where(running, stats.room, 0).sum() / num_running
        steps_to_come = jnp.clip(mean_room * num_running / jnp.maximum(emitted, 1e-6), 1.0)
        rate = emitted / (steady + catch_up / steps_to_come)

        drafts = candidates > 0
        best = jnp.argmax(jnp.where(drafts, rate, -jnp.inf))
        without = jnp.where(drafts, -jnp.inf, rate).max()  # -inf, if 0 is not among the lengths
        does_pay = rate[best] > without * jnp.where(jnp.isfinite(without), 1 + self.margin, 1.0)
        # A probe costs what its step takes beyond the time in which its tokens would have come anyway.
        regular = jnp.where(drafts, -jnp.inf, steady).max()
        probe = (steady + catch_up)[best] - emitted[best] * regular / num_running
        is_probe = ~does_pay & (state.budget >= probe)
        draft_len = jnp.where(does_pay | is_probe, candidates[best], candidates[0])
        budget = jnp.where(is_probe, 0.0, state.budget + self.probe_share * jnp.maximum(regular, 0.0))
        budget = jnp.where(does_pay, 0.0, budget).astype(jnp.float32)
        return state._replace(budget=budget), all_rows(stats, draft_len)

    def rates(self, state: GoodputState) -> Array:
        """``[P]``: the estimated acceptance by position."""
        expected = (self.prior * state.reached).sum()
        quality = (self.prior_weight + state.stood.sum()) / (self.prior_weight + expected)
        prior = jnp.clip(self.prior * quality, 0.0, 1.0)
        return (self.prior_weight * prior + state.stood) / (self.prior_weight + state.reached)

    def _observed(self, state: GoodputState, stats: PolicyStats) -> GoodputState:
        positions = jnp.arange(self.prior.shape[0])
        is_reached = (positions < stats.num_drafted[:, None]) & (positions <= stats.num_accepted[:, None])
        is_reached &= stats.is_active[:, None]
        has_stood = is_reached & (positions < stats.num_accepted[:, None])
        has_drafted = (stats.num_drafted > 0).any()
        emitted = jnp.where(stats.is_active, stats.num_emitted, 0).max()
        # Time passes in steps that drafted; a probe's news is kept until the next.
        decay = jnp.where(has_drafted, self.decay, 1.0)
        return state._replace(
            reached=(decay * state.reached + is_reached.sum(axis=0)).astype(jnp.float32),
            stood=(decay * state.stood + has_stood.sum(axis=0)).astype(jnp.float32),
            num_behind=jnp.where(has_drafted, 0, state.num_behind + emitted).astype(jnp.int32),
        )


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
        ValueError: if there is no profile and no cost, or no length.
    """
    cost, rates = cost_and_rates("goodput", profile, cost, rates)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths={lengths}: expected ascending ones")
    prior = [*rates] + [rates[-1]] * (lengths[-1] - len(rates))
    return Goodput(cost, jnp.asarray(prior, jnp.float32), lengths=tuple(lengths), **settings)


register_policy("goodput", goodput)
