"""The table model: measured times, interpolated."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.cost_model.protocol import Leaf, Number
from bass_jax.cost_model.roofline import CATCH_UP_CHUNK
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableModel:
    """Linear between the measured points, and beyond the last; below the first it is the first.

    Attributes:
        batches: ``[b]`` float32, ascending.
        widths: ``[w]`` float32, ascending: T of the target passes.
        contexts: ``[c]`` float32, ascending.
        target: ``[b, w, c]`` seconds of a step without its drafting.
        first_draft: ``[b, c]`` seconds of a round of one draft.
        next_draft: ``[b, c]`` seconds of every further draft.
        catch_up: ``[b, c]`` seconds of a pass that catches up with `CATCH_UP_CHUNK` tokens.
    """

    batches: Leaf
    widths: Leaf
    contexts: Leaf
    target: Leaf
    first_draft: Leaf
    next_draft: Leaf
    catch_up: Leaf

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Interpolates over all three."""
        by_batch = _between(self.batches, num_rows)
        by_width, by_context = _between(self.widths, num_tokens), _between(self.contexts, context)
        total = jnp.zeros(())
        for i, row_weight in by_batch:
            for j, width_weight in by_width:
                for k, context_weight in by_context:
                    total += row_weight * width_weight * context_weight * jnp.asarray(self.target)[i, j, k]
        return total

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """The first draft, the further ones, and what catching up takes."""
        num_drafts = jnp.asarray(num_drafts)
        num_reads = jnp.ceil(jnp.asarray(num_behind) / CATCH_UP_CHUNK)
        first, further, catch_up = (
            self._at(table, num_rows, context) for table in (self.first_draft, self.next_draft, self.catch_up)
        )
        return jnp.where(num_drafts > 0, first + (num_drafts - 1) * further + num_reads * catch_up, 0.0)

    def _at(self, table: Array, num_rows: Number, context: Number) -> Array:
        total = jnp.zeros(())
        for i, row_weight in _between(self.batches, num_rows):
            for k, context_weight in _between(self.contexts, context):
                total += row_weight * context_weight * jnp.asarray(table)[i, k]
        return total


def _between(grid: Array, value: Number) -> list[tuple[Array, Array]]:
    """The two grid points around `value`, each with its weight."""
    grid, value = jnp.asarray(grid), jnp.asarray(value, jnp.float32)
    if grid.shape[0] == 1:
        return [(jnp.int32(0), jnp.float32(1.0))]
    low = jnp.clip(jnp.searchsorted(grid, value, side="right") - 1, 0, grid.shape[0] - 2)
    share = jnp.maximum((value - grid[low]) / (grid[low + 1] - grid[low]), 0.0)
    return [(low, 1 - share), (low + 1, share)]
