"""Grouped products in Pallas' Triton dialect, for NVIDIA GPUs from sm_80 on.

The rows of a group are divided into blocks of `block_m`, the last of which may be partly empty. The grid is (tiles of
columns, blocks). A program multiplies the rows of one block with its columns of the matrix of the block's group, so
only the matrices of groups with rows are read, and they are read in the layout that they are stored in. Rows are read
and written where they are. The number of programs is that of the worst division; those without a block do nothing.

A first kernel makes the map from blocks to rows by comparing the groups of all rows with each other. Sorting takes a
dozen launches, which are a fifth of a step of one row of a model with many experts.

jax 0.11.0 deprecated this dialect; this module will be removed when jax removes it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.grouped.blocks import Blocks, blocks_of_groups, max_num_blocks
from kernels_pallas.grouped.xla import grouped_product_xla
from kernels_pallas.targets import silence_triton_deprecation
from kernels_pallas.tuning import GroupedTiles, next_power_of_two

MAX_COMPARED_ROWS = 16384
"""Rows up to which a kernel compares all with all; more are sorted by XLA."""

_MAX_COMPARISONS = 16384
"""Comparisons of rows with groups that a program of the map makes at once; more do not fit its registers."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_product_triton(
    rows: jax.Array, weights: jax.Array, groups: jax.Array, tiles: GroupedTiles, interpret: bool = False
) -> jax.Array:
    """Computes `kernels_pallas.ops.grouped_product`; the gradient is that of XLA.

    Args:
        rows: `[M, D]`.
        weights: `[G, C, D]`.
        groups: `[N]` int32, 0 ... G.
        tiles: Tile sizes and launch parameters.
        interpret: Run in jax's interpreter.

    Returns:
        `[N, C]` float32.

    Raises:
        NotImplementedError: C or D is no multiple of 16, the smallest side of a tensor-core product, or the offsets of
            an INT8 array exceed those of jax's kernels.
    """
    (num_groups, num_columns, depth), num_rows = weights.shape, groups.shape[0]
    if depth % 16 or num_columns % 16:
        raise NotImplementedError(f"the Triton kernel needs matrices whose sides 16 divides, not {weights.shape[1:]}")
    if weights.dtype.itemsize == 1 and 2**31 < weights.size <= 2**32:
        # jax counts elements in 32 bits with a sign up to 2^32 bytes.
        raise NotImplementedError(f"the Triton kernel does not address 8-bit weights of shape {weights.shape}")
    silence_triton_deprecation()
    # The rows without a matrix are one more group.
    if num_rows > MAX_COMPARED_ROWS:
        blocks = blocks_of_groups(groups, num_groups + 1, tiles.block_m)
    else:
        blocks = blocks_by_comparison(groups, num_groups + 1, tiles.block_m, interpret)
    of_block = pl.BlockSpec((None,), lambda column, block: (block,))
    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, repeats=num_rows // rows.shape[0]),
        grid=(num_columns // tiles.block_c, blocks.groups.shape[0]),
        in_specs=[
            pl.BlockSpec((tiles.block_m,), lambda column, block: (block,)),
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
    )(*blocks, rows, weights)


def _forward(rows, weights, groups, tiles, interpret):
    return grouped_product_triton(rows, weights, groups, tiles, interpret), (rows, weights, groups)


def _backward(tiles, interpret, saved, gradient):
    rows, weights, groups = saved
    gradients = jax.vjp(lambda rows, weights: grouped_product_xla(rows, weights, groups), rows, weights)[1](gradient)
    return *gradients, None


grouped_product_triton.defvjp(_forward, _backward)


def _kernel(index_ref, group_ref, size_ref, rows_ref, weights_ref, out_ref, *, tiles, repeats):
    """Computes one tile of columns of one block; the references to matrices are to all of them."""
    block_m, block_c, block_d = tiles.block_m, tiles.block_c, tiles.block_d
    group, size = group_ref[()], size_ref[()]
    first_column = pl.program_id(0) * block_c
    precision = lax.Precision.HIGHEST if rows_ref.dtype == jnp.float32 else None

    @pl.when(size > 0)
    def _():
        lane = jnp.arange(block_m)
        is_row = lane < size
        # In the interpreter, a masked element that is written where another is would undo it.
        index = jnp.where(is_row, plgpu.load(index_ref, mask=is_row, other=0), out_ref.shape[0] + lane)

        def place(index, start, width):
            column = jnp.broadcast_to(start + jnp.arange(width)[None, :], (block_m, width))
            mask = jnp.broadcast_to(is_row[:, None], (block_m, width))
            return (jnp.broadcast_to(index[:, None], (block_m, width)), column), mask

        def step(number, accumulator):
            start = number * block_d
            at, mask = place(index // repeats, start, block_d)
            values = plgpu.load(rows_ref.at[at], mask=mask, other=0.0)
            tile = plgpu.load(weights_ref.at[(group, pl.ds(first_column, block_c), pl.ds(start, block_d))])
            return accumulator + plgpu.dot(values, tile.astype(values.dtype), trans_b=True, precision=precision)

        # Rows without a group are zero.
        num_steps = jnp.where(group < weights_ref.shape[0], jnp.int32(rows_ref.shape[1] // block_d), jnp.int32(0))
        total = lax.fori_loop(0, num_steps, step, jnp.zeros((block_m, block_c), jnp.float32))
        at, mask = place(index, first_column, block_c)
        plgpu.store(out_ref.at[at], total, mask=mask)


def blocks_by_comparison(groups: jax.Array, num_groups: int, block_m: int, interpret: bool = False) -> Blocks:
    """Computes `kernels_pallas.grouped.blocks.blocks_of_groups` in one launch."""
    num_rows = groups.shape[0]
    num_blocks = max_num_blocks(num_rows, num_groups, block_m)
    width = max(16, min(64, next_power_of_two(num_rows), _MAX_COMPARISONS // next_power_of_two(num_groups)))
    shapes = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_blocks * block_m, num_blocks, num_blocks)]
    return Blocks(
        *pl.pallas_call(
            functools.partial(_blocks_kernel, num_groups=num_groups, block_m=block_m, width=width),
            grid=(pl.cdiv(num_rows, width),),
            in_specs=[pl.BlockSpec((num_rows,), lambda _: (0,))],
            out_specs=[pl.BlockSpec(shape.shape, lambda _: (0,)) for shape in shapes],
            out_shape=shapes,
            compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
            interpret=interpret,
            name="blocks_of_groups",
        )(groups)
    )


def _blocks_kernel(groups_ref, rows_ref, block_groups_ref, sizes_ref, *, num_groups, block_m, width):
    """Places the `width` rows of one program. Every program counts the rows of all groups."""
    num_rows, num_blocks = groups_ref.shape[0], sizes_ref.shape[0]
    lane = jnp.arange(width)
    row = pl.program_id(0) * width + lane
    group_lane = jnp.arange(next_power_of_two(num_groups))

    def groups_at(first):
        return plgpu.load(groups_ref.at[pl.ds(first, width)], mask=first + lane < num_rows, other=-1)

    own = groups_at(pl.program_id(0) * width)

    def step(number, carry):
        rank, size, sizes = carry
        first = number * width
        others = groups_at(first)
        is_same = (own[:, None] == others[None, :]).astype(jnp.int32)
        is_before = (first + lane[None, :] < row[:, None]).astype(jnp.int32)
        sizes += (group_lane[:, None] == others[None, :]).astype(jnp.int32).sum(axis=1)
        return rank + (is_same * is_before).sum(axis=1), size + is_same.sum(axis=1), sizes

    zeros = jnp.zeros((width,), jnp.int32)
    start = zeros, zeros, jnp.zeros(group_lane.shape, jnp.int32)
    rank, size, sizes = lax.fori_loop(0, pl.cdiv(num_rows, width), step, start)
    counts = (sizes + (block_m - 1)) // block_m
    is_earlier = (group_lane[None, :] < own[:, None]).astype(jnp.int32)
    block = (is_earlier * counts[None, :]).sum(axis=1) + rank // block_m
    place = rank % block_m
    is_row = row < num_rows
    # In the interpreter, a masked element that is written where another is would undo it.
    outside = num_blocks * block_m + lane
    plgpu.store(rows_ref.at[jnp.where(is_row, block * block_m + place, outside)], row, mask=is_row)
    is_first = is_row & (place == 0)
    at = jnp.where(is_first, block, outside)
    plgpu.store(block_groups_ref.at[at], own, mask=is_first)
    plgpu.store(sizes_ref.at[at], jnp.minimum(size - rank, block_m), mask=is_first)
    # There are at most as many blocks as rows, so every block that does not exist has a program.
    is_empty = (row >= counts.sum()) & (row < num_blocks)
    at = jnp.where(is_empty, row, outside)
    plgpu.store(block_groups_ref.at[at], zeros, mask=is_empty)
    plgpu.store(sizes_ref.at[at], zeros, mask=is_empty)
