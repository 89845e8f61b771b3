"""Blocks of rows with the same group, which programs of a grouped product multiply by one matrix each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Blocks(NamedTuple):
    """The map from X blocks to groups and rows; rows of a group are in their order."""

    rows: jax.Array  # [X * block_m] int32: numbers of the rows of every block, arbitrary after its last one
    groups: jax.Array  # [X] int32: group of every block, arbitrary if it has no rows
    sizes: jax.Array  # [X] int32: number of rows of every block


def max_num_blocks(num_rows: int, num_groups: int, block_m: int) -> int:
    """Returns the number of blocks of the worst division of the rows.

    It results if as many groups as possible have rows, and all but one row of each fill blocks.
    """
    num_groups = min(num_groups, num_rows)
    return num_groups + (num_rows - num_groups) // block_m


def blocks_of_groups(groups: jax.Array, num_groups: int, block_m: int) -> Blocks:
    """Divides rows into blocks by sorting them, in plain XLA; about a dozen launches on a GPU.

    Args:
        groups: `[N]` int32 group of every row, below `num_groups`.
        num_groups: Number of groups, some of which may be empty.
        block_m: Largest number of rows of a block.
    """
    num_rows = groups.shape[0]
    num_blocks = max_num_blocks(num_rows, num_groups, block_m)
    sizes = (groups[:, None] == jnp.arange(num_groups)).sum(axis=0, dtype=jnp.int32)
    counts = (sizes + (block_m - 1)) // block_m
    first_rows, block_ends = jnp.cumsum(sizes) - sizes, jnp.cumsum(counts)
    first_blocks = block_ends - counts
    order = jnp.argsort(groups, stable=True)
    of_row = groups[order]
    place = first_blocks[of_row] * block_m + jnp.arange(num_rows) - first_rows[of_row]
    rows = jnp.zeros(num_blocks * block_m, jnp.int32).at[place].set(order, unique_indices=True)
    block = jnp.arange(num_blocks)
    group = jnp.minimum((block[:, None] >= block_ends).sum(axis=1, dtype=jnp.int32), num_groups - 1)
    left = sizes[group] - (block - first_blocks[group]) * block_m
    return Blocks(rows, group, jnp.clip(left, 0, block_m).astype(jnp.int32))
