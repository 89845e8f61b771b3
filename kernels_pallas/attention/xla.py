"""Ragged attention in plain XLA, for CPUs and for GPUs where no kernel fits."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.attention.arguments import AttentionInputs, ScoreOptions
from kernels_pallas.attention.packing import gather_pages, pack_rows, pack_sinks, unpack_rows
from kernels_pallas.attention.weights import weight_terms


def ragged_attention_xla(
    inputs: AttentionInputs,
    options: ScoreOptions,
    *,
    is_cache_finite: bool = False,
    splits_weights: bool = True,
) -> jax.Array:
    """Computes `kernels_pallas.ops.ragged_attention` as two batched matrix products and a masked softmax.

    Neither cache is transposed: both products contract `[B, K, S, H]` in place, with the query heads of a kv head
    packed as rows. V is masked as well as the scores, because the cache may hold NaN where nothing was written and
    `0 * NaN` is NaN.

    Args:
        inputs: The op's arguments. Pages are gathered into a dense cache first.
        options: How scores are computed.
        is_cache_finite: No position of the cache holds NaN or infinity, so V is not masked. On a CPU the masked copy
            of V takes several times as long as the product itself.
        splits_weights: Multiply 16-bit values by two terms of each weight (`weight_terms`) instead of by the rounded
            weight. This doubles the work of the second product and the memory of the weights.

    Returns:
        `[B, T, N, H]` in q's dtype; zero where `t >= num_queries[b]`.
    """
    q, k_cache, v_cache, lengths, num_queries, k_scale, v_scale, tables, sinks = inputs
    num_tokens, num_heads = q.shape[1:3]
    if tables is not None:
        k_cache, v_cache = gather_pages(k_cache, tables), gather_pages(v_cache, tables)
        if k_scale is not None and v_scale is not None:
            k_scale, v_scale = gather_pages(k_scale, tables), gather_pages(v_scale, tables)
    num_kv_heads, capacity = k_cache.shape[1:3]
    group = num_heads // num_kv_heads

    token = np.arange(num_tokens * group, dtype=np.int32) // group  # a constant, which XLA does not compute per layer
    query_position = lengths[:, None] + token
    position = jnp.arange(capacity, dtype=jnp.int32)
    visible = position <= query_position[..., None]
    if options.window is not None:
        visible &= position > query_position[..., None] - options.window
    if options.chunk is not None:
        visible &= position >= query_position[..., None] // options.chunk * options.chunk
    visible &= (token < num_queries[:, None])[..., None]
    visible = visible[:, None]
    written = position < (lengths + num_queries)[:, None]

    rows = pack_rows(q, num_kv_heads)
    scores = jnp.einsum("bkmh,bksh->bkms", rows, k_cache.astype(q.dtype), preferred_element_type=jnp.float32)
    if k_scale is not None:
        scores *= k_scale[:, :, None]
    scores *= options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    # The maximum of a row that sees nothing is -inf, and -inf - -inf is NaN.
    row_max = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = pack_sinks(sinks, num_tokens, num_kv_heads)[..., None]
        row_max = jnp.maximum(row_max, sink)
    weights = jnp.exp(scores - row_max)
    row_sum = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        row_sum += jnp.exp(sink - row_max)
    if v_scale is not None:
        # Scale the weights instead of the values. Scales of unwritten positions may be NaN.
        weights *= jnp.where(written[:, None], v_scale, 0.0)[:, :, None]
        values = v_cache.astype(q.dtype)
    elif is_cache_finite:
        values = v_cache
    else:
        values = jnp.where(written[:, None, :, None], v_cache, jnp.zeros((), v_cache.dtype))
    terms = weight_terms(weights, q.dtype) if splits_weights else (weights.astype(q.dtype),)
    # One product with the terms as rows, so that V is read once.
    stacked = jnp.concatenate(terms, axis=2)
    products = jnp.einsum("bkms,bksh->bkmh", stacked, values, preferred_element_type=jnp.float32)
    out = sum(jnp.split(products, len(terms), axis=2))
    out /= jnp.where(row_sum == 0.0, 1.0, row_sum)
    # Padding queries have weights of 0, but a written value may be NaN.
    out = jnp.where((token < num_queries[:, None])[:, None, :, None], out, 0.0)
    return unpack_rows(out.astype(q.dtype), num_tokens)
