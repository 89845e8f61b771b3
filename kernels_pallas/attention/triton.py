"""Ragged attention in Pallas' Triton dialect, for NVIDIA GPUs from sm_80 on.

The grid is (kv heads of all rows, tiles of query rows, splits of the walk). A program holds up to `block_m` query rows
of one kv head, so K and V are read once per kv head. It walks over the blocks of the cache with an online softmax in
base 2 (FlashAttention-2, Dao 2023). At a small batch, several splits of a walk keep the card busy (Flash-Decoding, Dao
et al. 2023); each writes its partial softmax, and XLA merges them. With 16-bit inputs the weights are multiplied as two
terms, so that their rounding does not add to the output's error.

jax 0.11.0 deprecated this dialect; this module will be removed when jax removes it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.attention.arguments import AttentionInputs, ScoreOptions, check_page_size
from kernels_pallas.attention.packing import combine_splits
from kernels_pallas.attention.scores import MASKED, base_two_scores, first_visible
from kernels_pallas.attention.weights import weight_terms
from kernels_pallas.targets import silence_triton_deprecation
from kernels_pallas.tuning import AttentionTiles


def ragged_attention_triton(
    inputs: AttentionInputs, options: ScoreOptions, *, form: str, tiles: AttentionTiles, interpret: bool = False
) -> jax.Array:
    """Computes `kernels_pallas.ops.ragged_attention` in one launch, or in B launches with the form `"split"`.

    Args:
        inputs: The op's arguments.
        options: How scores are computed.
        form: `"pad"`, `"split"` or `"ragged"`.
        tiles: Tile sizes and launch parameters.
        interpret: Run in jax's interpreter.

    Returns:
        `[B, T, N, H]` in q's dtype; zero where `t >= num_queries[b]`.

    Raises:
        NotImplementedError: The head size is no multiple of 16, the smallest side of a tensor-core product, or the page
            size is no multiple of a block.
    """
    q, k_cache, v_cache, lengths, num_queries, k_scale, v_scale, tables, sinks = inputs
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1:3]
    capacity = inputs.capacity
    check_page_size(inputs, tiles.block_k)
    if head_dim % 16:
        raise NotImplementedError(f"the Triton kernel needs a head size that 16 divides, not {head_dim}")
    silence_triton_deprecation()

    total = jnp.minimum(lengths + num_queries, capacity)
    walk_end = jnp.broadcast_to(total.max(), total.shape) if form == "pad" else total
    queries = q.reshape(batch, num_tokens * num_heads, head_dim)
    group = num_heads // num_kv_heads
    num_tiles = pl.cdiv(num_tokens * group, tiles.block_m)
    is_partial = tiles.num_splits > 1 or sinks is not None
    out_dtype = jnp.float32 if is_partial else q.dtype
    kernel = functools.partial(
        _kernel,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        options=options,
        tiles=tiles,
        is_padded=form == "pad",
        is_partial=is_partial,
        capacity=capacity,
        is_paged=tables is not None,
    )

    def launch(first_row: int, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes rows `first_row ... first_row + num_rows - 1` of the batch in one launch."""

        def of_row(*block, trailing=lambda k: ()):
            # The whole cache is passed and the index map selects the row, because a slice would copy the cache.
            return pl.BlockSpec(block, lambda i, *_: (first_row + i // num_kv_heads, *trailing(k=i % num_kv_heads)))

        scalar = of_row(None)
        per_head = of_row(None, None, capacity, trailing=lambda k: (k, 0))
        cache = of_row(None, None, capacity, head_dim, trailing=lambda k: (k, 0, 0))
        scales = [] if k_scale is None else [k_scale, v_scale]
        page_tables, of_tables = [], []
        if tables is not None:
            # Every program receives its kv head of all pages, and the table of its row.
            block = (k_cache.shape[0], None, page_size, head_dim)
            cache = pl.BlockSpec(block, lambda i, *_: (0, i % num_kv_heads, 0, 0))
            page_tables, of_tables = [tables], [of_row(None, tables.shape[1], trailing=lambda k: (0,))]
        num_query_rows = num_tokens * num_heads
        partial_rows = (tiles.num_splits, num_rows, num_query_rows)

        def of_split(i, tile, split):
            return (split, i // num_kv_heads, 0)

        return pl.pallas_call(
            kernel,
            grid=(num_rows * num_kv_heads, num_tiles, tiles.num_splits),
            in_specs=[
                scalar,
                scalar,
                scalar,
                of_row(None, num_query_rows, head_dim, trailing=lambda k: (0, 0)),
                cache,
                cache,
                *of_tables,
                *[per_head for _ in scales],
            ],
            out_specs=[
                pl.BlockSpec((None, None, num_query_rows, head_dim), lambda *i: (*of_split(*i), 0)),
                pl.BlockSpec((None, None, num_query_rows), of_split),
                pl.BlockSpec((None, None, num_query_rows), of_split),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((*partial_rows, head_dim), out_dtype),
                jax.ShapeDtypeStruct(partial_rows, jnp.float32),
                jax.ShapeDtypeStruct(partial_rows, jnp.float32),
            ],
            compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
            interpret=interpret,
            name=f"ragged_attention_{form}",
        )(lengths, num_queries, walk_end, queries, k_cache, v_cache, *page_tables, *scales)

    if form == "split":
        launches = [launch(row, 1) for row in range(batch)]
        out, row_max, row_sum = (jnp.concatenate(parts, axis=1) for parts in zip(*launches, strict=True))
    else:
        out, row_max, row_sum = launch(0, batch)
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32), num_tokens)
    out = combine_splits(out, row_max, row_sum, sinks) if is_partial else out[0]
    return out.reshape(q.shape).astype(q.dtype)


def _kernel(
    length_ref,
    num_queries_ref,
    walk_end_ref,
    q_ref,
    k_ref,
    v_ref,
    *refs,
    num_tokens,
    num_heads,
    num_kv_heads,
    options,
    tiles,
    is_padded,
    is_partial,
    capacity,
    is_paged,
):
    """Computes one kv head of one row: `q_ref [T * N, H]`, `k_ref [S, H]`, `v_ref [S, H]`, scale references `[S]`.

    With pages, `k_ref` and `v_ref` are `[P, page, H]`, and `table_ref [M]` comes before the scales.
    """
    *in_refs, out_ref, max_ref, sum_ref = refs
    table_ref, *scale_refs = in_refs if is_paged else (None, *in_refs)
    block_m, block_k = tiles.block_m, tiles.block_k
    head_dim = k_ref.shape[-1]
    group = num_heads // num_kv_heads
    length, num_queries, walk_end = length_ref[()], num_queries_ref[()], walk_end_ref[()]
    total = jnp.minimum(length + num_queries, capacity)

    # The (token, query head) of each row of this tile, and its index in [T * N, H].
    row = pl.program_id(1) * block_m + jnp.arange(block_m)
    token = lax.div(row, jnp.int32(group))
    kv_head = lax.rem(pl.program_id(0), jnp.int32(num_kv_heads))
    query_index = token * num_heads + kv_head * group + lax.rem(row, jnp.int32(group))
    is_row = token < num_tokens
    query_position = length + token
    if options.chunk is not None:
        chunk_start = lax.div(query_position, jnp.int32(options.chunk)) * options.chunk

    # Triton's arrays have power-of-two sides, so a head size of 80 is split into 64 and 16.
    parts = _power_of_two_parts(head_dim)

    def tile_at(start, width):
        index = jnp.broadcast_to(query_index[:, None], (block_m, width))
        column = jnp.broadcast_to(start + jnp.arange(width)[None, :], (block_m, width))
        return (index, column), jnp.broadcast_to(is_row[:, None], (block_m, width))

    queries = []
    for start, width in parts:
        index, mask = tile_at(start, width)
        queries.append(plgpu.load(q_ref.at[index], mask=mask, other=0.0))
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    first_block = lax.div(first_visible(length, options), jnp.int32(block_k))
    end_block = lax.div(walk_end + (block_k - 1), jnp.int32(block_k))
    # The splits share the blocks of this row rather than those of the capacity, so that short rows use all splits.
    blocks_per_split = lax.div(end_block - first_block + (tiles.num_splits - 1), jnp.int32(tiles.num_splits))
    lower = first_block + pl.program_id(2) * blocks_per_split
    upper = jnp.minimum(lower + blocks_per_split, end_block)

    def walk(block, carry):
        accumulators, row_max, row_sum = carry
        start = block * block_k
        position = start + jnp.arange(block_k)
        is_walked, is_written = position < walk_end, position < total
        place = (pl.ds(start, block_k),)
        if table_ref is not None:
            # A block lies in one page, because blocks divide pages.
            page_size = k_ref.shape[1]
            page = plgpu.load(table_ref.at[lax.div(start, jnp.int32(page_size))])
            place = (page, pl.ds(lax.rem(start, jnp.int32(page_size)), block_k))

        scores = jnp.zeros((block_m, block_k), jnp.float32)
        for (column, width), query in zip(parts, queries, strict=True):
            mask = jnp.broadcast_to(is_walked[:, None], (block_k, width))
            keys = plgpu.load(k_ref.at[(*place, pl.ds(column, width))], mask=mask, other=0)
            scores += plgpu.dot(query, keys.astype(query.dtype), trans_b=True, precision=precision)
        if scale_refs:
            scores *= plgpu.load(scale_refs[0].at[pl.ds(start, block_k)], mask=is_walked, other=0.0)[None, :]
        visible = position[None, :] <= query_position[:, None]
        if options.window is not None:
            visible &= position[None, :] > query_position[:, None] - options.window
        if options.chunk is not None:
            visible &= position[None, :] >= chunk_start[:, None]
        if is_padded:
            # The walk reads past the row's end, where the cache may hold NaN that padding queries must not see.
            visible &= is_written[None, :]
        scores = jnp.where(visible, base_two_scores(scores, options), MASKED)

        new_max = jnp.maximum(row_max, scores.max(axis=1))
        weights = jnp.exp2(scores - new_max[:, None])
        decay = jnp.exp2(row_max - new_max)
        row_sum = row_sum * decay + weights.sum(axis=1)
        if scale_refs:
            # Scales past the row's end may be NaN.
            weights *= plgpu.load(scale_refs[1].at[pl.ds(start, block_k)], mask=is_written, other=0.0)[None, :]
        terms = weight_terms(weights, q_ref.dtype)
        new_accumulators = []
        for (column, width), accumulator in zip(parts, accumulators, strict=True):
            mask = jnp.broadcast_to(is_walked[:, None], (block_k, width))
            values = plgpu.load(v_ref.at[(*place, pl.ds(column, width))], mask=mask, other=0)
            if is_padded:
                values = jnp.where(is_written[:, None], values, jnp.zeros_like(values))
            accumulator *= decay[:, None]
            for term in terms:
                accumulator += plgpu.dot(term, values.astype(term.dtype), precision=precision)
            new_accumulators.append(accumulator)
        return tuple(new_accumulators), new_max, row_sum

    carry = (
        tuple(jnp.zeros((block_m, width), jnp.float32) for _, width in parts),
        jnp.full((block_m,), MASKED, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
    )
    accumulators, row_max, row_sum = lax.fori_loop(lower, upper, walk, carry)

    # A query that saw nothing in this split has a sum of ones. Every real query sees its own position in some split,
    # whose maximum makes this split's weight 2^-1e30 = 0.
    is_real = token < num_queries
    divisor = jnp.ones_like(row_sum) if is_partial else jnp.where(row_sum == 0.0, 1.0, row_sum)
    for (start, width), accumulator in zip(parts, accumulators, strict=True):
        out = jnp.where(is_real[:, None], accumulator / divisor[:, None], 0.0)
        index, mask = tile_at(start, width)
        plgpu.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)
    plgpu.store(max_ref.at[query_index], row_max, mask=is_row)
    plgpu.store(sum_ref.at[query_index], row_sum, mask=is_row)


def _power_of_two_parts(size: int) -> list[tuple[int, int]]:
    """Splits `size` into (start, width) pairs whose widths are powers of two, the widest first."""
    parts, start = [], 0
    while start < size:
        width = 1 << ((size - start).bit_length() - 1)
        parts.append((start, width))
        start += width
    return parts
