"""Grouped products in Pallas' Triton dialect, for NVIDIA GPUs from sm_80 on.

The rows of a group are divided into blocks of `block_m`, the last of which may be partly empty. The grid is (tiles of
columns, blocks). A program multiplies the rows of one block with its columns of the matrix of the block's group, so
only the matrices of groups with rows are read, and they are read in the layout that they are stored in. XLA computes
the map from blocks to groups. The number of programs is that of the worst division; those without a block do nothing.

jax 0.11.0 deprecated this dialect; this module will be removed when jax removes it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.grouped.xla import grouped_product_xla
from kernels_pallas.targets import silence_triton_deprecation
from kernels_pallas.tuning import GroupedTiles


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_product_triton(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, tiles: GroupedTiles, interpret: bool = False
) -> jax.Array:
    """Computes `kernels_pallas.ops.grouped_product` in one launch; the gradient is that of XLA.

    Args:
        rows: `[M, D]`.
        weights: `[G, C, D]`.
        sizes: `[G]` int32.
        tiles: Tile sizes and launch parameters.
        interpret: Run in jax's interpreter.

    Returns:
        `[M, C]` float32.

    Raises:
        NotImplementedError: C or D is no multiple of 16, the smallest side of a tensor-core product, or the offsets of
            an INT8 array exceed those of jax's kernels.
    """
    (num_rows, depth), num_columns = rows.shape, weights.shape[1]
    if depth % 16 or num_columns % 16:
        raise NotImplementedError(f"the Triton kernel needs matrices whose sides 16 divides, not {weights.shape[1:]}")
    if weights.dtype.itemsize == 1 and 2**31 < weights.size <= 2**32:
        # jax counts elements in 32 bits with a sign up to 2^32 bytes.
        raise NotImplementedError(f"the Triton kernel does not address 8-bit weights of shape {weights.shape}")
    silence_triton_deprecation()
    groups, first_rows, end_rows = blocks_of_groups(sizes, num_rows, tiles.block_m)
    of_block = pl.BlockSpec((None,), lambda column, block: (block,))
    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles),
        grid=(num_columns // tiles.block_c, groups.shape[0]),
        in_specs=[
            of_block,
            of_block,
            of_block,
            pl.BlockSpec(rows.shape, lambda *_: (0, 0)),
            pl.BlockSpec(weights.shape, lambda *_: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((num_rows, num_columns), lambda *_: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="grouped_product",
    )(groups, first_rows, end_rows, rows, weights)


def _forward(rows, weights, sizes, tiles, interpret):
    return grouped_product_triton(rows, weights, sizes, tiles, interpret), (rows, weights, sizes)


def _backward(tiles, interpret, saved, gradient):
    rows, weights, sizes = saved
    gradients = jax.vjp(lambda rows, weights: grouped_product_xla(rows, weights, sizes), rows, weights)[1](gradient)
    return *gradients, None


grouped_product_triton.defvjp(_forward, _backward)


def blocks_of_groups(sizes: jax.Array, num_rows: int, block_m: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the group, the first row and the end of the rows of every block, each int32.

    The rows after those of all G groups are blocks of a group G. Blocks that do not exist begin at their end or later.
    """
    sizes = jnp.concatenate([sizes, num_rows - sizes.sum(keepdims=True)])
    counts = (sizes + (block_m - 1)) // block_m
    row_ends, block_ends = jnp.cumsum(sizes), jnp.cumsum(counts)
    # The most blocks result if as many groups as possible have rows, and all but one row of each fill blocks.
    num_groups = min(sizes.shape[0], num_rows)
    block = jnp.arange(num_groups + (num_rows - num_groups) // block_m, dtype=jnp.int32)
    group = jnp.minimum((block[:, None] >= block_ends).sum(axis=1, dtype=jnp.int32), sizes.shape[0] - 1)
    first_rows = (row_ends - sizes)[group] + (block - (block_ends - counts)[group]) * block_m
    return group, first_rows, row_ends[group]


def _kernel(group_ref, first_row_ref, end_row_ref, rows_ref, weights_ref, out_ref, *, tiles):
    """Computes one tile of columns of one block; the references to arrays are to all of them."""
    block_m, block_c, block_d = tiles.block_m, tiles.block_c, tiles.block_d
    group, first_row, end_row = group_ref[()], first_row_ref[()], end_row_ref[()]
    row = first_row + jnp.arange(block_m)
    is_row = row < end_row
    first_column = pl.program_id(0) * block_c
    precision = lax.Precision.HIGHEST if rows_ref.dtype == jnp.float32 else None

    def rows_at(start, width):
        index = jnp.broadcast_to(row[:, None], (block_m, width))
        column = jnp.broadcast_to(start + jnp.arange(width)[None, :], (block_m, width))
        return (index, column), jnp.broadcast_to(is_row[:, None], (block_m, width))

    def step(index, accumulator):
        start = index * block_d
        place, mask = rows_at(start, block_d)
        values = plgpu.load(rows_ref.at[place], mask=mask, other=0.0)
        tile = plgpu.load(weights_ref.at[(group, pl.ds(first_column, block_c), pl.ds(start, block_d))])
        return accumulator + plgpu.dot(values, tile.astype(values.dtype), trans_b=True, precision=precision)

    @pl.when(first_row < end_row)
    def _():
        # Rows without a group are zero.
        num_steps = jnp.where(group < weights_ref.shape[0], jnp.int32(rows_ref.shape[1] // block_d), jnp.int32(0))
        total = lax.fori_loop(0, num_steps, step, jnp.zeros((block_m, block_c), jnp.float32))
        place, mask = rows_at(first_column, block_c)
        plgpu.store(out_ref.at[place], total, mask=mask)
