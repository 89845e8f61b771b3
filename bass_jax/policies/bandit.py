"""A bandit over draft lengths, which needs no model of acceptance."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.cost_model import step_seconds
from bass_jax.cost_model.protocol import Leaf
from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.typing import Array


class BanditState(NamedTuple):
    """Discounted sums per length (A lengths), and the steps whose seconds are not known yet."""

    num_pulls: Array  # [A] float32
    tokens: Array  # [A] float32, emitted per running row
    seconds: Array  # [A] float32
    arm: Array  # [] int32, index of the planned length; -1 before the first plan
    last_arm: Array  # [] int32, index of the length of the step before; -1 for none
    last_tokens: Array  # [] float32, emitted by that step per running row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bandit:
    """Chooses by discounted UCB the length with the highest tokens per second plus an exploration bonus.

    Every length is tried once, shortest first. The seconds of a step are known one step later, because the host reads
    its clock while the next step runs. In the device loop and in the simulator there is no clock, and `cost` gives the
    seconds.

    Attributes:
        cost: cost model that is used where there is no clock. None assumes a cost of `draft_share` target passes per
            draft.
        draft_share: see `cost`.
        exploration: weight of the exploration bonus, relative to the best length's tokens per second.
        decay: factor of the sums per step.
        lengths: draft lengths to choose from; static, ascending.

    Source: Garivier and Moulines 2011 (discounted UCB). BanditSpec (2025) makes lengths the arms of a bandit too.
    """

    cost: Leaf = None
    draft_share: Leaf = 0.1
    exploration: Leaf = 0.5
    decay: Leaf = 0.99
    lengths: tuple[int, ...] = dataclasses.field(default=(0, 1, 2, 4, 8), metadata={"static": True})

    def init(self, num_rows: int) -> BanditState:
        """Returns the state before any length was tried."""
        del num_rows
        zeros = jnp.zeros(len(self.lengths), jnp.float32)
        return BanditState(zeros, zeros, zeros, jnp.int32(-1), jnp.int32(-1), jnp.float32(0.0))

    def update(self, state: BanditState, stats: PolicyStats) -> tuple[BanditState, Plan]:
        """Adds the step whose seconds are now known to the sums, and chooses the next length."""
        num_active = stats.is_active.sum()
        has_stepped = num_active > 0
        tokens = stats.num_emitted.sum() / jnp.maximum(num_active, 1)
        has_clock = jnp.isfinite(stats.seconds)
        # With a clock, the seconds are those of the step before the last one.
        this_arm = jnp.where(has_stepped, state.arm, -1).astype(jnp.int32)
        arm = jnp.where(has_clock, jnp.where(stats.seconds > 0, state.last_arm, -1), this_arm)
        seconds = jnp.where(has_clock, stats.seconds, self._modeled_seconds(stats))
        emitted = jnp.where(has_clock, state.last_tokens, tokens)
        is_arm = jnp.arange(len(self.lengths)) == arm
        decay = jnp.where(arm >= 0, self.decay, 1.0)
        num_pulls, sum_tokens, sum_seconds = (
            (decay * total + jnp.where(is_arm, amount, 0.0)).astype(jnp.float32)
            for total, amount in ((state.num_pulls, 1.0), (state.tokens, emitted), (state.seconds, seconds))
        )
        rate = sum_tokens / jnp.maximum(sum_seconds, 1e-12)
        share = rate / jnp.maximum(rate.max(), 1e-12)
        bonus = jnp.sqrt(jnp.log(jnp.maximum(num_pulls.sum(), 2.0)) / jnp.maximum(num_pulls, 1e-6))
        # A length whose seconds are not known yet was tried, but cannot be compared.
        is_untried = num_pulls < 1e-3
        is_waiting = has_clock & (jnp.arange(len(self.lengths)) == this_arm)
        score = jnp.where(is_untried, jnp.where(is_waiting, -1.0, jnp.inf), share + self.exploration * bonus)
        chosen = jnp.argmax(score).astype(jnp.int32)
        state = BanditState(num_pulls, sum_tokens, sum_seconds, chosen, this_arm, tokens.astype(jnp.float32))
        return state, all_rows(stats, jnp.asarray(self.lengths, jnp.int32)[chosen])

    def _modeled_seconds(self, stats: PolicyStats) -> Array:
        num_drafts = stats.num_drafted.max()
        if self.cost is None:
            return 1.0 + self.draft_share * num_drafts
        context = stats.lengths.astype(jnp.float32).mean()
        return step_seconds(self.cost, stats.lengths.shape[0], num_drafts, context)


register_policy("bandit", Bandit)
