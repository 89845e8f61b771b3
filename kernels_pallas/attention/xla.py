"""Ragged attention in plain XLA: what runs on a CPU, and on a GPU where no kernel fits."""

import jax
import jax.numpy as jnp

from kernels_pallas.attention.packing import gather_pages, pack_rows, unpack_rows
from kernels_pallas.attention.weights import weight_terms


def ragged_attention_xla(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    num_queries: jax.Array,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    is_cache_finite: bool = False,
    splits_weights: bool = True,
    tables: jax.Array | None = None,
) -> jax.Array:
    """The op of `kernels_pallas.ops.ragged_attention` as two batched matrix products and a masked softmax.

    Neither cache is transposed: both products contract `[B, K, S, H]` where it lies, with the query heads of
    a kv head packed as rows. V is masked as well as the scores, because `0 * NaN` from uninitialized cache is
    NaN, unless the caller vouches for its cache: on a CPU the masked copy of V costs several times the
    product itself.

    Args:
        q: `[B, T, N, H]` queries.
        k_cache: `[B, K, S, H]` keys in q's dtype, or int8 with `k_scale`.
        v_cache: `[B, K, S, H]` values, like `k_cache`.
        lengths: `[B]` int32 tokens in the cache before the T new ones.
        num_queries: `[B]` int32 real queries among the T.
        window: Positions a query sees, itself included, or None for all.
        scale: Factor on the scores.
        soft_cap: c, where a scaled score x becomes `c tanh(x / c)`, or None.
        k_scale: `[B, K, S]` float32 scales of an int8 `k_cache`, or None.
        v_scale: `[B, K, S]` float32 scales of an int8 `v_cache`, or None.
        is_cache_finite: No position of the cache holds NaN or infinity, written or not.
        splits_weights: 16-bit values are multiplied by two terms of each weight (`weight_terms`), not by the weight
            rounded; that is twice the work of the second product and the memory of its weights.
        tables: `[B, M]` int32 in `0 ... P - 1`, where the caches are pages `[P, K, page, H]`: they are gathered first.

    Returns:
        `[B, T, N, H]` in q's dtype; zero where `t >= num_queries[b]`.
    """
    num_tokens, num_heads = q.shape[1:3]
    if tables is not None:
        k_cache, v_cache = gather_pages(k_cache, tables), gather_pages(v_cache, tables)
        if k_scale is not None and v_scale is not None:
            k_scale, v_scale = gather_pages(k_scale, tables), gather_pages(v_scale, tables)
    num_kv_heads, capacity = k_cache.shape[1:3]
    group = num_heads // num_kv_heads

    token = jnp.arange(num_tokens * group, dtype=jnp.int32) // group
    query_position = lengths[:, None] + token
    position = jnp.arange(capacity, dtype=jnp.int32)
    visible = position <= query_position[..., None]
    if window is not None:
        visible &= position > query_position[..., None] - window
    visible &= (token < num_queries[:, None])[..., None]
    visible = visible[:, None]
    written = position < (lengths + num_queries)[:, None]

    rows = pack_rows(q, num_kv_heads)
    scores = jnp.einsum("bkmh,bksh->bkms", rows, k_cache.astype(q.dtype), preferred_element_type=jnp.float32)
    if k_scale is not None:
        scores *= k_scale[:, :, None]
    scores *= scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    # A row that sees nothing has a maximum of -inf; -inf - -inf would be NaN.
    row_max = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - row_max)
    row_sum = weights.sum(axis=-1, keepdims=True)
    if v_scale is not None:
        # The scale of a value moves onto its weight; a NaN scale of an unwritten position must not come
        # along.
        weights *= jnp.where(written[:, None], v_scale, 0.0)[:, :, None]
        values = v_cache.astype(q.dtype)
    elif is_cache_finite:
        values = v_cache
    else:
        values = jnp.where(written[:, None, :, None], v_cache, jnp.zeros((), v_cache.dtype))
    terms = weight_terms(weights, q.dtype) if splits_weights else (weights.astype(q.dtype),)
    # One product over all terms as rows, so that V is read once.
    stacked = jnp.concatenate(terms, axis=2)
    products = jnp.einsum("bkms,bksh->bkmh", stacked, values, preferred_element_type=jnp.float32)
    out = sum(jnp.split(products, len(terms), axis=2))
    out /= jnp.where(row_sum == 0.0, 1.0, row_sum)
    # A query that is none has weights of zero, and 0 * NaN of a written position is NaN.
    out = jnp.where((token < num_queries[:, None])[:, None, :, None], out, 0.0)
    return unpack_rows(out.astype(q.dtype), num_tokens)
