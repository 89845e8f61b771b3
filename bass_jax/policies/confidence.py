"""Stop drafting where the draft is unsure, row by row."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.cost_model.protocol import Leaf
from bass_jax.policies.protocol import Plan, PolicyStats, register_policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Drafts up to `max_len`, and ends a row before a draft whose most probable token has less than `threshold`.

    The drafter looks at the distribution before it draws, so no draft is dropped for what it is, and a lossless rule
    keeps the target's distribution. Drafters that know no confidence draft `max_len`.

    Attributes:
        threshold: probability, 0 to 1.
        max_len: most drafts per row.

    Source: the idea of stopping by the draft's own probability is that of Mamou et al. 2024 (DISCO, arXiv 2405.04304)
    and of Kim et al. 2023 (BiLD, arXiv 2302.07863).
    """

    threshold: Leaf = 0.4
    max_len: int = dataclasses.field(default=8, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, ...]:
        """The one bucket; how much of it is drafted is seen on the device."""
        return (self.max_len,)

    def init(self, num_rows: int) -> None:
        """Nothing to keep."""
        del num_rows

    def update(self, state: None, stats: PolicyStats) -> tuple[None, Plan]:
        """Plans the same bounds again."""
        shape = stats.lengths.shape
        return state, Plan(jnp.full(shape, self.max_len, jnp.int32), jnp.full(shape, self.threshold, jnp.float32))


register_policy("confidence", Confidence)
