"""Stops drafting, row by row, when the drafter's confidence is low."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.cost_model.protocol import Leaf
from bass_jax.policies.protocol import Plan, PolicyStats, register_policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Drafts up to `max_len` tokens, and ends a row before the first draft with a confidence below `threshold`.

    The confidence is a property of the distribution and not of the sampled draft, so a lossless rule keeps the target's
    distribution. Drafters that report no confidence draft `max_len` tokens.

    Attributes:
        threshold: probability of the most probable token, 0 to 1.
        max_len: largest number of drafts per row.

    Source: Mamou et al. 2024 (DISCO, arXiv 2405.04304) and Kim et al. 2023 (BiLD, arXiv 2302.07863) stop by the draft
    model's own probability.
    """

    threshold: Leaf = 0.4
    max_len: int = dataclasses.field(default=8, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, ...]:
        """The largest length; the actual number of drafts is decided on the device."""
        return (self.max_len,)

    def init(self, num_rows: int) -> None:
        """Returns None: the policy has no state."""
        del num_rows

    def update(self, state: None, stats: PolicyStats) -> tuple[None, Plan]:
        """Plans the largest length and the threshold."""
        shape = stats.lengths.shape
        return state, Plan(jnp.full(shape, self.max_len, jnp.int32), jnp.full(shape, self.threshold, jnp.float32))


register_policy("confidence", Confidence)
