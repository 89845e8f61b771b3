"""The table model: interpolates measured times."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from bass_jax.cost_model.protocol import Leaf, Number
from bass_jax.drafters.autoregressive import CATCH_UP_CHUNK
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableModel:
    """Interpolates linearly between the measured points.

    Above the last point the times are extrapolated; below the first they are constant.

    Attributes:
        batches: ``[b]`` float32, ascending.
        widths: ``[w]`` float32, ascending: T of the target passes.
        contexts: ``[c]`` float32, ascending.
        target: ``[b, w, c]`` float32, seconds of a step without its drafting.
        first_draft: ``[b, c]`` float32, seconds of proposing one draft.
        next_draft: ``[b, c]`` float32, seconds of each further draft.
        catch_up: ``[b, c]`` float32, seconds of a pass in which the drafter reads `CATCH_UP_CHUNK` committed tokens.
    """

    batches: Leaf
    widths: Leaf
    contexts: Leaf
    target: Leaf
    first_draft: Leaf
    next_draft: Leaf
    catch_up: Leaf

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Interpolates over batch, width and context."""
        return _interpolate(self.target, (self.batches, num_rows), (self.widths, num_tokens), (self.contexts, context))

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """Returns the time of the first draft, the further drafts and the passes that catch up."""
        num_drafts = jnp.asarray(num_drafts)
        num_reads = jnp.ceil(jnp.asarray(num_behind) / CATCH_UP_CHUNK)
        axes = (self.batches, num_rows), (self.contexts, context)
        first, further, catch_up = (
            _interpolate(table, *axes) for table in (self.first_draft, self.next_draft, self.catch_up)
        )
        return jnp.where(num_drafts > 0, first + (num_drafts - 1) * further + num_reads * catch_up, 0.0)


def _interpolate(table: Array, *axes: tuple[Array, Number]) -> Array:
    """Interpolates `table` linearly, given the grid and the value of each axis."""
    total = jnp.zeros(())
    for corner in itertools.product(*(_neighbors(grid, value) for grid, value in axes)):
        indices, weights = zip(*corner)
        total += math.prod(weights) * jnp.asarray(table)[indices]
    return total


def _neighbors(grid: Array, value: Number) -> list[tuple[Array, Array]]:
    """Returns the indices and the weights of the two grid points around `value`."""
    grid, value = jnp.asarray(grid), jnp.asarray(value, jnp.float32)
    if grid.shape[0] == 1:
        return [(jnp.int32(0), jnp.float32(1.0))]
    low = jnp.clip(jnp.searchsorted(grid, value, side="right") - 1, 0, grid.shape[0] - 2)
    share = jnp.maximum((value - grid[low]) / (grid[low + 1] - grid[low]), 0.0)
    return [(low, 1 - share), (low + 1, share)]
