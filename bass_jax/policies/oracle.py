"""A policy for simulations that knows how many drafts would be accepted."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.cost_model import step_seconds
from bass_jax.cost_model.protocol import Leaf
from bass_jax.policies.protocol import Plan, PolicyStats
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Oracle:
    """Chooses in every step the length with the most tokens per second, given the number of accepted drafts.

    No row drafts a token that would be rejected. The policy is greedy: it optimizes each step by itself. With one row
    and costs that do not depend on the position it is close to optimal. With many rows it is an upper bound for
    policies that do not know the accepted drafts, but not the optimum.

    Attributes:
        cost: of the simulated device.
        lengths: draft lengths to choose from; static, ascending.
    """

    cost: Leaf
    lengths: tuple[int, ...] = dataclasses.field(default=tuple(range(33)), metadata={"static": True})

    def init(self, num_rows: int) -> Array:
        """Returns 0, the number of tokens that the drafter has not read."""
        del num_rows
        return jnp.int32(0)

    def update(self, state: Array, stats: PolicyStats) -> tuple[Array, Plan]:
        """Plans the best length.

        Raises:
            ValueError: outside a simulator, during tracing.
        """
        if stats.num_acceptable is None:
            raise ValueError("oracle: expected num_acceptable, which only a simulator knows")
        emitted = jnp.where(stats.is_active, stats.num_emitted, 0).max()
        num_behind = jnp.where((stats.num_drafted > 0).any(), 0, state + emitted).astype(jnp.int32)
        candidates = jnp.asarray(self.lengths, jnp.int32)
        usable = jnp.minimum(stats.num_acceptable, stats.room - 1)
        accepted = jnp.clip(jnp.minimum(candidates[:, None], usable), 0)
        emitted_next = jnp.where(stats.is_running, accepted + 1, 0).sum(axis=1)
        context = stats.lengths.astype(jnp.float32).mean()
        seconds = step_seconds(self.cost, stats.lengths.shape[0], candidates, context, num_behind)
        draft_len = candidates[jnp.argmax(emitted_next / seconds)]
        return num_behind, Plan(jnp.clip(jnp.minimum(draft_len, usable), 0).astype(jnp.int32))
