"""The cost model's protocol: what a pass takes, as functions that run on the host and inside a policy alike."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.typing import Array

type Number = Array | np.ndarray | float | int
"""A scalar, or an array that broadcasts with the others."""


type Leaf = Any
"""A float or an array in a pytree; anything while jax rebuilds the tree."""


@runtime_checkable
class CostModel(Protocol):
    """Seconds of the passes of a step; a frozen pytree of pure functions in `jax.numpy`."""

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Time of a target pass with what follows it.

        Args:
            num_rows: rows of the batch, finished ones and fillers included.
            num_tokens: T, positions per row that are computed.
            context: committed tokens per row.
        """
        ...

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """Time of drafting; 0 for no drafts.

        Args:
            num_rows: rows of the batch.
            num_drafts: of the row that drafts most.
            context: committed tokens per row.
            num_behind: committed tokens that the drafter has not read yet, of the row where they are most; what it
                reads in the course of any round is not counted.
        """
        ...


def bucket_of(draft_len: Number) -> Array:
    """Returns the draft-length bucket that `draft_len` runs in."""
    buckets = jnp.asarray(DRAFT_LEN_BUCKETS)
    return buckets[jnp.minimum(jnp.searchsorted(buckets, jnp.asarray(draft_len)), len(DRAFT_LEN_BUCKETS) - 1)]


def step_seconds(
    cost: CostModel, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number = 0
) -> Array:
    """Returns the time of one step: drafting, and a target pass over the bucket of `num_drafts`."""
    width = bucket_of(num_drafts) + 1
    return cost.target_seconds(num_rows, width, context) + cost.draft_seconds(num_rows, num_drafts, context, num_behind)
