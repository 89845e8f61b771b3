"""A bandit over draft lengths, which needs no model of acceptance."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.cost_model.protocol import Leaf
from bass_jax.policies.auto import step_seconds
from bass_jax.policies.protocol import Plan, PolicyStats, all_rows, register_policy
from bass_jax.typing import Array


class BanditState(NamedTuple):
    """Discounted sums per length (A lengths)."""

    num_pulls: Array  # [A] float32
    tokens: Array  # [A] float32, emitted per running row
    arm: Array  # [] int32, index of the planned length; -1 before the first plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bandit:
    """Chooses by discounted UCB the length with the highest tokens per second plus an exploration bonus.

    Every length is tried once, shortest first.

    Attributes:
        cost: as in `bass_jax.policies.Auto`.
        exploration: weight of the exploration bonus, relative to the best length's tokens per second.
        decay: factor of the sums per step.
        use_clock: as in `bass_jax.policies.Auto`.
        lengths: draft lengths to choose from; static, ascending.

    Source: Garivier and Moulines 2011 (discounted UCB). BanditSpec (2025) makes lengths the arms of a bandit too.
    """

    cost: Leaf = None
    exploration: Leaf = 0.5
    decay: Leaf = 0.99
    use_clock: bool = dataclasses.field(default=True, metadata={"static": True})
    lengths: tuple[int, ...] = dataclasses.field(default=(0, 1, 2, 4, 8), metadata={"static": True})

    def init(self, num_rows: int) -> BanditState:
        """Returns the state before any length was tried."""
        del num_rows
        zeros = jnp.zeros(len(self.lengths), jnp.float32)
        return BanditState(zeros, zeros, jnp.int32(-1))

    def update(self, state: BanditState, stats: PolicyStats) -> tuple[BanditState, Plan]:
        """Adds the last step to the sums, and chooses the next length."""
        num_active = stats.is_active.sum()
        is_arm = (jnp.arange(len(self.lengths)) == state.arm) & (num_active > 0)
        decay = jnp.where(is_arm.any(), self.decay, 1.0)
        num_pulls = decay * state.num_pulls + is_arm
        tokens = decay * state.tokens + is_arm * (stats.num_emitted.sum() / jnp.maximum(num_active, 1))
        rate = tokens / jnp.maximum(num_pulls, 1e-6) / step_seconds(stats, self.lengths, self.cost)
        share = rate / jnp.maximum(rate.max(), 1e-12)
        bonus = jnp.sqrt(jnp.log(jnp.maximum(num_pulls.sum(), 2.0)) / jnp.maximum(num_pulls, 1e-6))
        score = jnp.where(num_pulls < 1e-3, jnp.inf, share + self.exploration * bonus)
        arm = jnp.argmax(score).astype(jnp.int32)
        state = BanditState(num_pulls.astype(jnp.float32), tokens.astype(jnp.float32), arm)
        return state, all_rows(stats, jnp.asarray(self.lengths, jnp.int32)[arm])


register_policy("bandit", Bandit)
