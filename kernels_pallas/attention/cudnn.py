"""The attention that cuDNN can do, put together to ragged verification: the baseline of the benchmark, and a choice."""

from typing import Literal

import jax
import jax.numpy as jnp

_HEAD_MULTIPLE = 8


def ragged_attention_cudnn(
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
    interpret: bool = False,
) -> jax.Array:
    """The op of `kernels_pallas.ops.ragged_attention` by `prefix_and_merge`.

    jax gives cuDNN `[B, S, K, H]`, so both caches are transposed in every call: for comparison, not for speed.

    Args:
        q: `[B, T, N, H]` queries.
        k_cache: `[B, K, S, H]` keys in q's dtype.
        v_cache: `[B, K, S, H]` values, like `k_cache`.
        lengths: `[B]` int32 in `0 ... S`.
        num_queries: `[B]` int32 in `0 ... T`.
        window: None; what follows is not what this can do.
        scale: Factor on the scores.
        soft_cap: None.
        k_scale: None.
        v_scale: None.
        is_cache_finite: True: cuDNN is not known to skip what lies past a row's end.
        interpret: Run XLA in cuDNN's place, on any device and in any float.

    Returns:
        `[B, T, N, H]` in q's dtype; zero where `t >= num_queries[b]`.

    Raises:
        NotImplementedError: A window, a cap, an INT8 cache, one that may hold NaN, float32, a head size that 8 does not
            divide, or a machine without cuDNN.
    """
    if window is not None or soft_cap is not None or k_scale is not None or v_scale is not None:
        raise NotImplementedError("cuDNN's prefix is taken without a window, a soft cap or an INT8 cache")
    if not is_cache_finite:
        raise NotImplementedError("cuDNN needs a cache without NaN, written or not: is_cache_finite")
    if not interpret and (q.dtype == jnp.float32 or q.shape[3] % _HEAD_MULTIPLE):
        raise NotImplementedError(
            f"cuDNN needs bfloat16 or float16 and a head size that {_HEAD_MULTIPLE} divides, not {q.dtype} and "
            f"{q.shape[3]}"
        )
    keys, values = (jnp.swapaxes(cache, 1, 2) for cache in (k_cache, v_cache))
    try:
        return prefix_and_merge(
            q, keys, values, lengths, num_queries, scale=scale, implementation="xla" if interpret else "cudnn"
        )
    except RuntimeError as error:
        raise NotImplementedError(f"cuDNN is not there: {error}") from error


def prefix_and_merge(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    num_queries: jax.Array | None = None,
    *,
    scale: float | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Ragged verification attention as a padded prefix and a dense causal part, merged by log-sum-exp.

    cuDNN's causal mask is aligned with the top left corner, so it cannot place T new queries at the end of a longer
    prefix; what it can do is the prefix without them. The new tokens' own causal part is T x T.

    Args:
        q: `[B, T, N, H]` queries.
        k_cache: `[B, S, K, H]` keys, cuDNN's layout, not `ragged_attention`'s; all finite.
        v_cache: `[B, S, K, H]` values, like `k_cache`.
        lengths: `[B]` int32 tokens before the new ones.
        num_queries: `[B]` int32 real queries among the T; all where None.
        scale: Factor on the scores; `H ** -0.5` where None.
        implementation: What `jax.nn.dot_product_attention` computes the prefix with.

    Returns:
        `[B, T, N, H]` in q's dtype; zero where `t >= num_queries[b]`.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    capacity, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    factor = head_dim**-0.5 if scale is None else scale
    prefix, prefix_norm = jax.nn.dot_product_attention(
        q,
        k_cache,
        v_cache,
        scale=factor,
        query_seq_lengths=jnp.full((batch,), num_tokens, jnp.int32),
        # A softmax over nothing is none: an empty prefix reads a position and has no share in the merge.
        key_value_seq_lengths=jnp.maximum(lengths, 1),
        implementation=implementation,
        return_residual=True,
    )
    position = jnp.minimum(lengths[:, None] + jnp.arange(num_tokens), capacity - 1)[:, :, None, None]
    keys, values = (jnp.take_along_axis(cache, position, axis=1) for cache in (k_cache, v_cache))
    grouped = q.reshape(batch, num_tokens, num_kv_heads, group, head_dim)
    scores = jnp.einsum("btkrh,bskh->bkrts", grouped, keys, preferred_element_type=jnp.float32) * factor
    scores = jnp.where(jnp.tril(jnp.ones((num_tokens, num_tokens), bool)), scores, -jnp.inf)
    norm = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - norm).astype(values.dtype)
    own = jnp.einsum("bkrts,bskh->btkrh", weights, values).reshape(q.shape)
    own_norm = norm[..., 0].transpose(0, 3, 1, 2).reshape(batch, num_tokens, num_heads)
    share = jnp.where((lengths > 0)[:, None, None], jax.nn.sigmoid(prefix_norm - own_norm), 0.0)[..., None]
    out = (prefix * share + own * (1.0 - share)).astype(q.dtype)
    if num_queries is None:
        return out
    is_real = jnp.arange(num_tokens) < num_queries[:, None]
    return jnp.where(is_real[..., None, None], out, jnp.zeros_like(out))
