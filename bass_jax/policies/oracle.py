"""The oracle: a simulator tells it how many drafts would be accepted."""

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
    """Each step the length that in truth gives most tokens per second.

    A row drafts what will be accepted of it and no more. Myopic: with one row and costs that do not depend on the
    position it is close to the least time there is; with many rows it is a bound that no policy without hindsight
    reaches, rather than the optimum.

    Attributes:
        cost: of the simulated device.
        lengths: static, to choose from; ascending.
    """

    cost: Leaf
    lengths: tuple[int, ...] = dataclasses.field(default=tuple(range(33)), metadata={"static": True})

    def init(self, num_rows: int) -> Array:
        """Keeps the tokens that the drafter has to catch up with."""
        del num_rows
        return jnp.int32(0)

    def update(self, state: Array, stats: PolicyStats) -> tuple[Array, Plan]:
        """Plans with hindsight.

        Raises:
            ValueError: when traced, outside a simulator.
        """
        if stats.num_acceptable is None:
            raise ValueError("oracle: expected num_acceptable, which a simulator alone knows")
        emitted = jnp.where(stats.is_active, stats.num_emitted, 0).max()
        num_behind = jnp.where((stats.num_drafted > 0).any(), 0, state + emitted).astype(jnp.int32)
        candidates = jnp.asarray(self.lengths, jnp.int32)
        useful = jnp.minimum(stats.num_acceptable, stats.room - 1)
        accepted = jnp.clip(jnp.minimum(candidates[:, None], useful), 0)
        gained = jnp.where(stats.is_running, accepted + 1, 0).sum(axis=1)
        context = stats.lengths.astype(jnp.float32).mean()
        seconds = step_seconds(self.cost, stats.lengths.shape[0], candidates, context, num_behind)
        draft_len = candidates[jnp.argmax(gained / seconds)]
        return num_behind, Plan(jnp.clip(jnp.minimum(draft_len, useful), 0).astype(jnp.int32))
