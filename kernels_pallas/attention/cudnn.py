"""The attention that cuDNN can do, put together to ragged verification: the baseline of the benchmark."""

import math
from typing import Literal

import jax
import jax.numpy as jnp


def prefix_and_merge(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Ragged verification attention as a padded prefix and a dense causal part, merged by log-sum-exp.

    cuDNN's causal mask is aligned with the top left corner, so it cannot place T new queries at the end of a longer
    prefix; what it can do is the prefix without them. The new tokens' own causal part is T x T.

    Args:
        q: `[B, T, N, H]` queries.
        k_cache: `[B, S, K, H]` keys, cuDNN's layout, not `ragged_attention`'s.
        v_cache: `[B, S, K, H]` values.
        lengths: `[B]` int32 tokens before the new ones, at least 1; all T queries are real.
        implementation: What `jax.nn.dot_product_attention` computes the prefix with.

    Returns:
        `[B, T, N, H]` in q's dtype.
    """
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    prefix, prefix_norm = jax.nn.dot_product_attention(
        q,
        k_cache,
        v_cache,
        query_seq_lengths=jnp.full((batch,), num_tokens, jnp.int32),
        key_value_seq_lengths=lengths,
        implementation=implementation,
        return_residual=True,
    )
    position = (lengths[:, None] + jnp.arange(num_tokens))[:, :, None, None]
    keys, values = (jnp.take_along_axis(cache, position, axis=1) for cache in (k_cache, v_cache))
    grouped = q.reshape(batch, num_tokens, num_kv_heads, group, head_dim)
    scores = jnp.einsum("btkrh,bskh->bkrts", grouped, keys, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    scores = jnp.where(jnp.tril(jnp.ones((num_tokens, num_tokens), bool)), scores, -jnp.inf)
    norm = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - norm).astype(values.dtype)
    own = jnp.einsum("bkrts,bskh->btkrh", weights, values).reshape(q.shape)
    own_norm = norm[..., 0].transpose(0, 3, 1, 2).reshape(batch, num_tokens, num_heads)
    share = jax.nn.sigmoid(prefix_norm - own_norm)[..., None]
    return (prefix * share + own * (1.0 - share)).astype(q.dtype)
