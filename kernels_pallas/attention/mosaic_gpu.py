"""Ragged attention in Pallas' Mosaic GPU dialect, for Hopper GPUs.

The grid and the walk are those of the Triton kernel. A program is one warpgroup with 64 query rows, the height of a
wgmma. TMA copies K and V into a ring of `num_stages` blocks, so that the next block is copied while the current one is
multiplied. A head of 256 is computed by two programs, each with all of K and half of V; the second one finds K in the
L2 cache.

Float32 is left to the Triton kernel: wgmma rounds float32 to TF32, whose products have three correct digits, and the op
promises an error of 1e-5. Each block of an INT8 cache is converted to 16 bits in shared memory before it is multiplied;
its scales are applied to the scores and to the weights.
"""

# The dialect re-exports private names and its transforms look abstract to a static checker.
# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.attention.arguments import AttentionInputs, ScoreOptions, check_page_size
from kernels_pallas.attention.packing import combine_splits, pack_rows, pack_sinks, unpack_rows
from kernels_pallas.attention.scores import MASKED, base_two_scores, first_visible
from kernels_pallas.attention.weights import weight_terms
from kernels_pallas.tuning import AttentionTiles

_BLOCK_M = 64
# jax 0.11.2 cannot lower the store of a converted block into swizzled shared memory.
_FIRST_WITH_INT8 = (0, 12)
# Columns of V that a program multiplies; the sum and the product of twice as many would not fit in its registers.
_MAX_COLUMNS = 128


def ragged_attention_mosaic_gpu(
    inputs: AttentionInputs, options: ScoreOptions, *, form: str, tiles: AttentionTiles, interpret: bool = False
) -> jax.Array:
    """Computes `kernels_pallas.ops.ragged_attention` in one launch, or in B launches with the form `"split"`.

    Args:
        inputs: The op's arguments.
        options: How scores are computed.
        form: `"pad"`, `"split"` or `"ragged"`.
        tiles: Tile sizes; `block_m` and `num_warps` are ignored and are always 64 and 4.
        interpret: Run in jax's interpreter.

    Returns:
        `[B, T, N, H]` in q's dtype; zero where `t >= num_queries[b]`.

    Raises:
        NotImplementedError: The cache is float32, or INT8 before jax 0.12, the head size is no multiple of 16 (of 128
            above 128), or the capacity or the page size is no multiple of a block.
    """
    q, k_cache, v_cache, lengths, num_queries, k_scale, v_scale, tables, sinks = inputs
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1], inputs.capacity
    check_page_size(inputs, tiles.block_k)
    if k_scale is not None and jax.__version_info__ < _FIRST_WITH_INT8 and not interpret:
        raise NotImplementedError(f"the Mosaic GPU kernel of an INT8 cache needs jax 0.12, not {jax.__version__}")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the Mosaic GPU kernel needs bfloat16 or float16, not {q.dtype}")
    if head_dim % 16 or (head_dim > _MAX_COLUMNS and head_dim % _MAX_COLUMNS):
        raise NotImplementedError(
            f"the Mosaic GPU kernel needs a head size that 16 divides, from {_MAX_COLUMNS} on that {_MAX_COLUMNS} "
            f"divides, not {head_dim}"
        )
    if capacity % tiles.block_k:
        raise NotImplementedError(
            f"the Mosaic GPU kernel needs a capacity that {tiles.block_k} divides, not {capacity}"
        )

    total = jnp.minimum(lengths + num_queries, capacity)
    walk_end = jnp.broadcast_to(total.max(), total.shape) if form == "pad" else total
    rows = pack_rows(q, num_kv_heads)
    num_rows = rows.shape[2]
    num_tiles = pl.cdiv(num_rows, _BLOCK_M)
    # A wgmma has 64 rows. Of a single tile only the query rows, rounded up to whole swizzle tiles, are copied.
    tile_rows = _BLOCK_M if num_tiles > 1 else pl.cdiv(num_rows, 8) * 8
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, num_tiles * tile_rows - num_rows), (0, 0)))
    kernel = functools.partial(
        _kernel,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        options=options,
        tiles=tiles,
        tile_rows=tile_rows,
        is_quantized=k_scale is not None,
        is_paged=tables is not None,
    )
    page_tables = () if tables is None else (tables,)
    scales = () if k_scale is None else (k_scale, v_scale)
    columns = min(head_dim, _MAX_COLUMNS)
    num_parts = head_dim // columns
    transforms = _transforms(head_dim)
    ring_transforms, staging = transforms, ()
    if scales:
        ring_transforms = ()
        staging = tuple(
            plgpu.SMEM((tiles.block_k, width), q.dtype, transforms=transforms) for width in (head_dim, columns)
        )

    def launch(first_row: int, num_batch_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes rows `first_row ... first_row + num_batch_rows - 1` of the batch in one launch."""
        partial_rows = (tiles.num_splits, num_batch_rows, num_kv_heads, num_tiles * tile_rows)
        return plgpu.kernel(
            functools.partial(kernel, first_row=first_row),
            out_type=(
                jax.ShapeDtypeStruct((*partial_rows, head_dim), jnp.float32),
                jax.ShapeDtypeStruct(partial_rows, jnp.float32),
                jax.ShapeDtypeStruct(partial_rows, jnp.float32),
            ),
            grid=(num_batch_rows * num_kv_heads, num_tiles * num_parts, tiles.num_splits),
            grid_names=("kv_head", "tile", "split"),
            scratch_types=(
                plgpu.SMEM((_BLOCK_M, head_dim), q.dtype, transforms=transforms),
                plgpu.SMEM((2, _BLOCK_M, tiles.block_k), q.dtype, transforms=transforms),
                plgpu.SMEM((tiles.num_stages, tiles.block_k, head_dim), k_cache.dtype, transforms=ring_transforms),
                plgpu.SMEM((tiles.num_stages, tiles.block_k, columns), v_cache.dtype, transforms=ring_transforms),
                plgpu.SMEM((_BLOCK_M, columns), jnp.float32),
                plgpu.SMEM((2, _BLOCK_M), jnp.float32),
                *staging,
                plgpu.Barrier(),
                plgpu.Barrier(num_barriers=tiles.num_stages),
                plgpu.Barrier(num_barriers=tiles.num_stages),
            ),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(lengths, total, walk_end, rows, k_cache, v_cache, *page_tables, *scales)

    if form == "split":
        launches = [launch(row, 1) for row in range(batch)]
        parts = tuple(jnp.concatenate(part, axis=1) for part in zip(*launches, strict=True))
    else:
        parts = launch(0, batch)
    if sinks is not None:
        sinks = pack_sinks(sinks, num_tokens, num_kv_heads)
    out = unpack_rows(combine_splits(*(part[:, :, :, :num_rows] for part in parts), sinks=sinks), num_tokens)
    is_real = jnp.arange(num_tokens) < num_queries[:, None]
    return jnp.where(is_real[..., None, None], out, 0.0).astype(q.dtype)


def _kernel(
    length_ref,
    total_ref,
    walk_end_ref,
    q_ref,
    k_ref,
    v_ref,
    *refs,
    first_row,
    group,
    num_kv_heads,
    options,
    tiles,
    tile_rows,
    is_quantized,
    is_paged,
):
    """Computes one split of one tile of one kv head of one row."""
    table_ref, *refs = refs if is_paged else (None, *refs)
    k_scale_ref, v_scale_ref, *refs = refs if is_quantized else (None, None, *refs)
    out_ref, max_ref, sum_ref, q_smem, weight_smem, k_smem, v_smem, out_smem, statistics_smem, *refs = refs
    *staging, q_barrier, k_barrier, v_barrier = refs
    block_k, num_stages, num_splits = tiles.block_k, tiles.num_stages, tiles.num_splits
    columns = out_smem.shape[1]
    num_parts = q_smem.shape[1] // columns
    program, tile_part = lax.axis_index("kv_head"), lax.axis_index("tile")
    local_row, kv_head = lax.div(program, num_kv_heads), lax.rem(program, num_kv_heads)
    row = first_row + local_row
    tile, part = lax.div(tile_part, num_parts), lax.rem(tile_part, num_parts)
    split = lax.axis_index("split")
    length, total, walk_end = length_ref[row], total_ref[row], walk_end_ref[row]

    first_block = lax.div(first_visible(length, options), block_k)
    end_block = lax.div(walk_end + (block_k - 1), block_k)
    # The splits share the blocks of this row rather than those of the capacity, so that short rows use all splits.
    blocks_per_split = lax.div(end_block - first_block + (num_splits - 1), num_splits)
    lower = first_block + split * blocks_per_split
    num_blocks = jnp.maximum(jnp.minimum(lower + blocks_per_split, end_block) - lower, 0)

    query_rows, used = pl.ds(tile * tile_rows, tile_rows), pl.ds(0, tile_rows)
    own_columns = pl.ds(part * columns, columns)
    plgpu.copy_gmem_to_smem(q_ref.at[row, kv_head, query_rows], q_smem.at[used], q_barrier)

    def fetch(block, slot):
        start = (lower + block) * block_k
        source = (row, kv_head, pl.ds(start, block_k))
        if table_ref is not None:
            # A block lies in one page, because blocks divide pages.
            page_size = k_ref.shape[2]
            page = table_ref[row, lax.div(start, page_size)]
            source = (page, kv_head, pl.ds(lax.rem(start, page_size), block_k))
        plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[slot], k_barrier.at[slot])
        plgpu.copy_gmem_to_smem(v_ref.at[(*source, own_columns)], v_smem.at[slot], v_barrier.at[slot])

    for slot in range(num_stages):
        pl.when(slot < num_blocks)(functools.partial(fetch, jnp.int32(slot), slot))
    plgpu.barrier_wait(q_barrier)

    def walk(block, carry):
        accumulator, row_max, row_sum = carry
        slot = lax.rem(block, num_stages)
        start = (lower + block) * block_k
        plgpu.barrier_wait(k_barrier.at[slot])

        keys = k_smem.at[slot]
        if is_quantized:
            keys = staging[0]
            keys[...] = k_smem[slot].astype(keys.dtype)
            plgpu.commit_smem()

        def multiply_keys(scores_ref):
            plgpu.wgmma(scores_ref, q_smem, keys.transpose((1, 0)))
            return scores_ref[...]

        scores = pl.run_scoped(multiply_keys, plgpu.ACC((_BLOCK_M, block_k), jnp.float32))

        def scales_of(scale_ref):
            values = scale_ref[row, kv_head, pl.ds(start, block_k)]
            return lax.broadcast_in_dim(values, (_BLOCK_M, block_k), [1])

        if is_quantized:
            scores *= scales_of(k_scale_ref)
        scores = base_two_scores(scores, options)
        query_row = lax.broadcasted_iota(jnp.int32, (_BLOCK_M, block_k), 0) + tile * _BLOCK_M
        position = lax.broadcasted_iota(jnp.int32, (_BLOCK_M, block_k), 1) + start
        # position <= length + query_row // group, without a division per element.
        visible = ((position - length) * group <= query_row) & (position < total)
        if options.window is not None:
            # position > length + query_row // group - window
            visible &= (position - length + options.window) * group > query_row
        if options.chunk is not None:
            # The queries are in at most two chunks, because a chunk has at least as many positions.
            first = lax.div(length, options.chunk) * options.chunk
            second = first + options.chunk
            visible &= (position >= second) | ((position >= first) & (query_row < (second - length) * group))
        scores = jnp.where(visible, scores, MASKED)

        new_max = jnp.maximum(row_max, scores.max(axis=1))
        decay = jnp.exp2(row_max - new_max)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
        row_sum = row_sum * decay + weights.sum(axis=1)
        accumulator = accumulator * lax.broadcast_in_dim(decay, accumulator.shape, [0])
        if is_quantized:
            weights *= jnp.where(position < total, scales_of(v_scale_ref), 0.0)
        # The weights go through shared memory, because jax's interpreter cannot multiply registers.
        for index, term in enumerate(weight_terms(weights, weight_smem.dtype)):
            weight_smem[index] = term
        plgpu.barrier_wait(v_barrier.at[slot])

        values_ref = v_smem.at[slot]
        if is_quantized:
            values_ref = staging[1]
            values_ref[...] = v_smem[slot].astype(values_ref.dtype)

        def drop_unwritten():
            # Values past the row's end may be NaN, and 0 * NaN is NaN.
            is_written = lax.broadcasted_iota(jnp.int32, (block_k, columns), 0) + start < total
            values = v_smem[slot]
            v_smem[slot] = jnp.where(is_written, values, jnp.zeros_like(values))

        if not is_quantized:
            pl.when(start + block_k > total)(drop_unwritten)
        plgpu.commit_smem()

        def multiply_values(product_ref):
            for index in range(weight_smem.shape[0]):
                plgpu.wgmma(product_ref, weight_smem.at[index], values_ref)
            return product_ref[...]

        accumulator += pl.run_scoped(multiply_values, plgpu.ACC((_BLOCK_M, columns), jnp.float32))

        @pl.when(block + num_stages < num_blocks)
        def _():
            fetch(block + num_stages, slot)

        return accumulator, new_max, row_sum

    carry = (
        jnp.zeros((_BLOCK_M, columns), jnp.float32),
        jnp.full((_BLOCK_M,), MASKED, jnp.float32),
        jnp.zeros((_BLOCK_M,), jnp.float32),
    )
    out_smem[...], statistics_smem[0, :], statistics_smem[1, :] = lax.fori_loop(0, num_blocks, walk, carry)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[used], out_ref.at[split, local_row, kv_head, query_rows, own_columns])
    # Programs with other columns of the head write the same values.
    plgpu.copy_smem_to_gmem(statistics_smem.at[0, used], max_ref.at[split, local_row, kv_head, query_rows])
    plgpu.copy_smem_to_gmem(statistics_smem.at[1, used], sum_ref.at[split, local_row, kv_head, query_rows])
    plgpu.wait_smem_to_gmem(0)


def _transforms(head_dim: int) -> tuple:
    """Returns the widest swizzle whose span of two-byte elements divides a head; wgmma reads it without conflicts."""
    span = next(span for span in (64, 32, 16) if head_dim % span == 0)
    return plgpu.TilingTransform((8, span)), plgpu.SwizzleTransform(2 * span)
