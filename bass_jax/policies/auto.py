"""Chooses the draft length while decoding, from the measured times of steps and the observed acceptance."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.cost_model import CostModel, Profile
from bass_jax.cost_model import step_seconds as modeled_step_seconds
from bass_jax.cost_model.protocol import Leaf
from bass_jax.policies.batch_table import cost_and_rates
from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.typing import Array, Float

LENGTHS = (0, 1, 2, 3, 4, 6, 8)
"""The default draft lengths. At most four of them are compiled per batch size."""

NOT_COMPILED = 0.95
"""The expected tokens per second of a length that is not compiled count as this share, because compiling takes time."""

PRIOR_ACCEPTANCE, PRIOR_COST = 0.7, 0.15
"""Assumed before anything is measured: the acceptance rate of a draft, and its cost relative to a regular step."""


class AutoState(NamedTuple):
    """Decayed counts of drafts by position, and the trials of other lengths (A lengths, P positions)."""

    rates: Array  # [P] float32, estimated acceptance rates, from the prior and the next two counts
    num_accepted: Array  # [P] float32, drafts at this position that were accepted
    num_reached: Array  # [P] float32, rows that wanted a draft at this position, and accepted all drafts before it
    row_accepted: Array  # [B] float32, accepted drafts of the row
    row_expected: Array  # [B] float32, accepted drafts that the rates of the batch predict for the row
    budget: Array  # [A] float32, seconds that a trial of each length may cost now
    chosen: Array  # [] int32, index of the planned length
    num_left: Array  # [] int32, further steps of the current trial


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Auto:
    """Chooses the length with the most expected tokens per second of the slowest row, or of the mean row.

    The host measures how long a step of each length takes, and the policy counts how often the draft at each position
    is accepted. A length of n drafts is expected to emit 1 + y1 + y1·y2 + … + y1·…·yn tokens, where yi is the rate at
    which the i-th draft is proposed and accepted after the drafts before it were. The rates are those of the batch,
    times the row's own accepted drafts over those that the rates predicted for it, relative to those of all rows.
    The slowest row counts, because a batch takes as long as its slowest row. While little is known of the rows, the
    slowest of many is expected to be further below their mean than that of few. With continuous batching the mean of
    the rows counts, because the next request takes the row of one that ends.

    To notice changes, the policy tries the other compiled lengths from time to time. A trial costs the time by which it
    emits its tokens later than the best length would; all trials together may cost `trial_share` of the time.

    A run starts from the rates of the last run of such a pair in the process in place of `prior`, and from what was
    saved for trials, unless `use_clock` is False.

    Attributes:
        cost: cost model for lengths that were not measured, and for loops without a clock; None assumes that a draft
            costs `PRIOR_COST` regular steps.
        prior: ``[P]`` float32, acceptance rates that the estimates start from.
        prior_weight: number of drafts that the prior counts as, at each position.
        row_weight: number of accepted drafts that the rates of the batch count as, for one row.
        row_spread: standard deviation of the rates of rows that have not drafted, relative to the rates of the batch.
        memory: number of steps with drafts after which a count has lost two thirds of its weight.
        trial_share: see above.
        use_clock: measure the steps. False takes all times from `cost`, so that a run repeats exactly; static.
        lengths: draft lengths to choose from; static, ascending.

    Source: the objective is the goodput of Liu et al. 2024 (SmartSpec, arXiv 2406.14066).
    """

    cost: Leaf
    prior: Leaf
    prior_weight: Leaf = 8.0
    row_weight: Leaf = 16.0
    row_spread: Leaf = 0.1
    memory: Leaf = 100.0
    trial_share: Leaf = 0.01
    use_clock: bool = dataclasses.field(default=True, metadata={"static": True})
    lengths: tuple[int, ...] = dataclasses.field(default=LENGTHS, metadata={"static": True})

    def init(self, num_rows: int) -> AutoState:
        """Returns counts of 0."""
        nums = self.prior.shape[0], num_rows, len(self.lengths)
        positions, rows, lengths = (np.zeros(num, np.float32) for num in nums)
        state = AutoState(self.prior, positions, positions, rows, rows, lengths, np.int32(-1), np.int32(0))  # type: ignore
        return jax.device_put(state)  # Unlike `jnp.zeros`, this compiles nothing.

    def update(self, state: AutoState, stats: PolicyStats) -> tuple[AutoState, Plan]:
        """Counts the drafts of the last step, and chooses the next length."""
        lengths = jnp.asarray(self.lengths, jnp.int32)
        state = self._count(state, stats)
        seconds = step_seconds(stats, self.lengths, self.cost)
        tokens = self.expected_tokens(state, stats.is_running, stats.is_refilled)
        rates = tokens / seconds * jnp.where(stats.is_compiled, 1.0, NOT_COMPILED)
        best = jnp.argmax(rates).astype(jnp.int32)

        # The tokens of a trial would have taken the best length tokens[i] / tokens[best] of its steps.
        loss = seconds - tokens / tokens[best] * seconds[best]
        resumes = (lengths[best] == 0) & (lengths > 0)
        loss = jnp.where(resumes, 2 * loss + jnp.nan_to_num(stats.resume_seconds), loss)
        has_stepped = stats.is_active.any()
        earned = stats.num_steps * self.trial_share / stats.is_compiled.sum() * seconds[best]
        budget = state.budget + jnp.where(has_stepped & stats.is_compiled, earned, 0.0)
        is_due = (budget >= loss) & (jnp.arange(len(lengths)) != best) & has_stepped
        is_due &= stats.is_compiled
        trial = jnp.argmax(jnp.where(is_due, budget / jnp.maximum(loss, 1e-9), -1.0)).astype(jnp.int32)

        goes_on = state.num_left > 0
        chosen = jnp.where(goes_on, state.chosen, jnp.where(is_due.any(), trial, best))
        # The drafter catches up in the first of two steps, and the second one is measured.
        num_left = jnp.where(goes_on, state.num_left - 1, jnp.where(is_due.any() & resumes[trial], 1, 0))
        budget = jnp.where(jnp.arange(len(lengths)) == chosen, 0.0, budget)
        state = state._replace(budget=budget, chosen=chosen, num_left=num_left.astype(jnp.int32))
        return state, all_rows(stats, lengths[chosen])

    def expected_tokens(
        self, state: AutoState, is_running: Array, is_refilled: Array | bool = False
    ) -> Float[Array, "A"]:
        """Returns the tokens that a step of each length is expected to emit for the row that counts, or else a new one.

        Args:
            state: after the last step.
            is_running: ``[B]`` bool.
            is_refilled: ``[]`` bool; the mean of the rows counts, and else the slowest.
        """
        accepted, expected = state.row_accepted + self.row_weight, state.row_expected + self.row_weight
        # What all rows have in common is in the rates of the batch already, and in a batch of one row this is all.
        # Rows that have finished are in these rates too.
        has_drafted = state.row_expected > 0
        common = jnp.where(has_drafted, accepted, 1e-6).sum() / jnp.where(has_drafted, expected, 1e-6).sum()
        # A row counts as unknown by the share that its assumed drafts have in its estimate.
        unknown = self.row_weight / expected
        num_unknown = jnp.round(jnp.where(is_running, unknown, 0.0).sum()).astype(jnp.int32)
        lowest = jnp.asarray([lowest_of(num) for num in range(len(is_running) + 1)])[num_unknown]
        ratios = accepted / expected / common
        mean = jnp.where(is_running, ratios, 0.0).sum() / jnp.maximum(is_running.sum(), 1)
        below = lowest * self.row_spread * jnp.sqrt(unknown)
        slowest = jnp.where(is_running, ratios + below, jnp.inf).min()
        ratio = jnp.where(is_running.any(), jnp.where(is_refilled, mean, slowest), 1.0)
        rates = jnp.clip(state.rates * ratio, 0.0, 1.0)
        tokens = 1 + jnp.pad(jnp.cumsum(jnp.cumprod(rates)), (1, 0))
        return tokens[jnp.asarray(self.lengths)]

    def _count(self, state: AutoState, stats: PolicyStats) -> AutoState:
        positions = jnp.arange(self.prior.shape[0])
        # A draft that the drafter did not propose counts as rejected; one that a token limit prevented does not count.
        num_wanted = jnp.where(stats.was_clipped, stats.num_drafted, stats.num_wanted)
        is_reached = (positions < num_wanted[:, None]) & (positions <= stats.num_accepted[:, None])
        is_reached &= stats.is_active[:, None]
        has_drafts = is_reached[:, 0]
        was_accepted = is_reached & (positions < stats.num_accepted[:, None])
        fading = jnp.exp(-1 / self.memory)
        decay = jnp.where(has_drafts.any(), fading, 1.0)
        row_decay = jnp.where(has_drafts, fading, 1.0)
        expected = jnp.where(positions < num_wanted[:, None], jnp.cumprod(state.rates), 0.0).sum(axis=1)
        num_accepted = decay * state.num_accepted + was_accepted.sum(axis=0)
        num_reached = decay * state.num_reached + is_reached.sum(axis=0)
        return state._replace(
            rates=self._rates(num_accepted, num_reached),
            num_accepted=num_accepted,
            num_reached=num_reached,
            row_accepted=row_decay * state.row_accepted + was_accepted.sum(axis=1),
            row_expected=row_decay * state.row_expected + jnp.where(has_drafts, expected, 0.0),
        )

    def _rates(self, num_accepted: Float[Array, "P"], num_reached: Float[Array, "P"]) -> Float[Array, "P"]:
        """Returns the acceptance rates. The ratio of a rate to its prior also scales the prior of the next position."""

        def next_rate(ratio: Array, position: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            accepted, reached, prior = position
            rate = (accepted + self.prior_weight * jnp.minimum(ratio * prior, 1.0)) / (reached + self.prior_weight)
            return rate / jnp.maximum(prior, 1e-6), rate

        return jax.lax.scan(next_rate, jnp.float32(1.0), (num_accepted, num_reached, self.prior))[1]


def lowest_of(num: int) -> float:
    """Returns the expected lowest of `num` draws from the standard normal distribution, 0 for none, as Blom (1958)."""
    from statistics import NormalDist  # Not at every import, which it makes slower.

    return NormalDist().inv_cdf(0.625 / (num + 0.25)) if num else 0.0


def step_seconds(stats: PolicyStats, lengths: tuple[int, ...], cost: Leaf = None) -> Float[Array, "A"]:
    """Returns the time of a step of each length: as measured, or else as modeled, in proportion to what was measured.

    Args:
        stats: of the last step.
        lengths: A draft lengths.
        cost: cost model; None assumes that a draft costs `PRIOR_COST` regular steps.
    """
    drafts = jnp.asarray(lengths, jnp.float32)
    if cost is None:
        modeled = 1 + PRIOR_COST * drafts
    else:
        num_running = jnp.maximum(stats.is_running.sum(), 1)
        context = jnp.where(stats.is_running, stats.lengths, 0).sum() / num_running
        modeled = modeled_step_seconds(cost, stats.lengths.shape[0], drafts, context)
    is_measured = jnp.isfinite(stats.step_seconds)
    ratio = jnp.where(is_measured, stats.step_seconds / modeled, 0.0).sum() / jnp.maximum(is_measured.sum(), 1)
    return jnp.where(is_measured, stats.step_seconds, modeled * jnp.where(is_measured.any(), ratio, 1.0))


def auto(
    *,
    profile: Profile | str | Path | None = None,
    cost: CostModel | None = None,
    rates: Sequence[float] | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    **settings: Any,
) -> Auto:
    """Makes the policy.

    Args:
        profile: a profile of the pair on this device, or its file, to start from.
        cost: with `rates`, instead of a profile.
        rates: acceptance rate by position.
        lengths: draft lengths to choose from; each of them is compiled when it is first chosen.
        settings: other attributes of `Auto`.

    Raises:
        ValueError: if the lengths are not ascending, or the profile cannot be read.
    """
    if not lengths or list(lengths) != sorted(set(lengths)) or lengths[-1] > DRAFT_LEN_BUCKETS[-1]:
        raise ValueError(f"lengths={lengths}: expected ascending draft lengths of at most {DRAFT_LEN_BUCKETS[-1]}")
    if not (profile is None and cost is None and rates is None):
        cost, rates = cost_and_rates("auto", profile, cost, rates)
    rates = list(rates or [PRIOR_ACCEPTANCE])
    rates = [*rates, *[rates[-1]] * lengths[-1]][: max(lengths[-1], 1)]
    return Auto(cost, jax.device_put(np.asarray(rates, np.float32)), lengths=tuple(lengths), **settings)


register_policy("auto", auto)
