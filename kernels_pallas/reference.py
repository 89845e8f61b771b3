"""What every op means, in plain jnp and float32; the tests compare each implementation with this."""

import jax
import jax.numpy as jnp


def ragged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    num_queries: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Query t of row b attends to positions `lengths[b] + t - window < s <= lengths[b] + t`, head by head.

    `out[b,t,n] = sum_s softmax_s(scale * q[b,t,n] . k[b,k,s]) v[b,k,s]` with `k = n // R` (grouped-query
    attention, Ainslie et al. 2023); the arguments are those of `kernels_pallas.ops.ragged_attention`.

    Returns:
        `[B, T, N, H]` float32; zero where `t >= num_queries[b]`.
    """
    _, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    keys, values = k_cache.astype(jnp.float32), v_cache.astype(jnp.float32)
    if k_scale is not None:
        keys *= k_scale[..., None]
    if v_scale is not None:
        values *= v_scale[..., None]
    group = num_heads // num_kv_heads
    keys, values = jnp.repeat(keys, group, axis=1), jnp.repeat(values, group, axis=1)

    token = jnp.arange(num_tokens)
    query_position = lengths[:, None, None] + token[:, None]
    position = jnp.arange(capacity)
    visible = position <= query_position
    if window is not None:
        visible &= position > query_position - window
    if num_queries is not None:
        visible &= token[:, None] < num_queries[:, None, None]
    visible = visible[:, None]

    factor = head_dim**-0.5 if scale is None else scale
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btnh,bnsh->bnts", q.astype(jnp.float32), keys, precision=precision) * factor
    weights = jax.nn.softmax(scores, axis=-1, where=visible)
    # 0 * NaN is NaN: values no query sees are dropped before the product.
    values = jnp.where(visible.any(axis=2)[..., None], values, 0.0)
    return jnp.einsum("bnts,bnsh->btnh", jnp.where(visible, weights, 0.0), values, precision=precision)
