"""The protocol of cost models: the times of passes, as functions for the host and for compiled policies."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.typing import Array

type Number = Array | np.ndarray | float | int
"""A scalar, or an array that broadcasts with the other arguments."""

type Leaf = Any
"""A float or an array in a pytree. JAX puts other objects there while it rebuilds the tree."""


@runtime_checkable
class CostModel(Protocol):
    """Predicts the seconds of the passes of a step. A cost model is a frozen pytree of pure `jax.numpy` functions."""

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Returns the time of a target pass, including acceptance and commit.

        Args:
            num_rows: rows of the batch, including finished rows and padding rows.
            num_tokens: T, positions per row that are computed.
            context: committed tokens per row.
        """
        ...

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """Returns the time of drafting; 0 without drafts.

        Args:
            num_rows: rows of the batch.
            num_drafts: largest number of drafts of a row.
            context: committed tokens per row.
            num_behind: largest number of committed tokens of a row that the drafter has not read and that a normal
                step would not read.
        """
        ...


def step_seconds(
    cost: CostModel, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number = 0
) -> Array:
    """Returns the time of one step: drafting, and a target pass over the draft-length bucket of `num_drafts`."""
    buckets = jnp.asarray(DRAFT_LEN_BUCKETS)
    width = buckets[jnp.minimum(jnp.searchsorted(buckets, jnp.asarray(num_drafts)), len(DRAFT_LEN_BUCKETS) - 1)] + 1
    return cost.target_seconds(num_rows, width, context) + cost.draft_seconds(num_rows, num_drafts, context, num_behind)
