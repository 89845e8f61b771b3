"""Definitions of the ops in plain jnp and float32; the tests compare every implementation with them."""

import jax
import jax.numpy as jnp

from kernels_pallas.acceptance.types import KernelAcceptance, KernelSampling


def ragged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    num_queries: jax.Array | None = None,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tables: jax.Array | None = None,
) -> jax.Array:
    """Computes `out[b,t,n] = sum_s softmax_s(scale * q[b,t,n] . k[b,k,s]) v[b,k,s]` with `k = n // R`.

    Query t of row b attends to positions `lengths[b] + t - window < s <= lengths[b] + t` (grouped-query attention,
    Ainslie et al. 2023). With a `chunk` c, only positions `s >= (lengths[b] + t) // c * c` are seen. With a `soft_cap`
    c, a scaled score x becomes `c tanh(x / c)`. A sink is one more score of a head, whose weight is dropped. The
    arguments are those of `kernels_pallas.ops.ragged_attention`.

    Returns:
        `[B, T, N, H]` float32; zero where `t >= num_queries[b]`.
    """
    _, num_tokens, num_heads, head_dim = q.shape
    if tables is not None:
        position = jnp.arange(tables.shape[1] * k_cache.shape[2])
        page, offset = position // k_cache.shape[2], position % k_cache.shape[2]

        def dense_rows(pages):
            return jnp.stack([jnp.moveaxis(pages[table[page], :, offset], 0, 1) for table in tables])

        k_cache, v_cache = dense_rows(k_cache), dense_rows(v_cache)
        if k_scale is not None and v_scale is not None:
            k_scale, v_scale = dense_rows(k_scale), dense_rows(v_scale)
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
    if chunk is not None:
        visible &= position >= query_position // chunk * chunk
    if num_queries is not None:
        visible &= token[:, None] < num_queries[:, None, None]
    visible = visible[:, None]

    factor = head_dim**-0.5 if scale is None else scale
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btnh,bnsh->bnts", q.astype(jnp.float32), keys, precision=precision) * factor
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:-1], 1))
        with_sink = jnp.concatenate([scores, sink], axis=-1)
        is_used = jnp.concatenate([visible, jnp.ones((*visible.shape[:-1], 1), bool)], axis=-1)
        weights = jax.nn.softmax(with_sink, axis=-1, where=is_used)[..., :-1]
    else:
        weights = jax.nn.softmax(scores, axis=-1, where=visible)
    # Values that no query sees may be NaN, and 0 * NaN is NaN.
    values = jnp.where(visible.any(axis=2)[..., None], values, 0.0)
    return jnp.einsum("bnts,bnsh->btnh", jnp.where(visible, weights, 0.0), values, precision=precision)


def grouped_product(rows: jax.Array, weights: jax.Array, groups: jax.Array) -> jax.Array:
    """Multiplies every row by the matrix of its group.

    The arguments are those of `kernels_pallas.ops.grouped_product`.
    """
    is_member = groups[:, None] == jnp.arange(weights.shape[0])
    products = jnp.einsum(
        "md,gcd->mgc", *(x.astype(jnp.float32) for x in (rows, weights)), precision=jax.lax.Precision.HIGHEST
    )
    products = jnp.repeat(products, groups.shape[0] // rows.shape[0], axis=0)
    return jnp.where(is_member[..., None], products, 0.0).sum(axis=1)


def target_probs(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Applies temperature, top-k, top-p and min-p by sorting; see `KernelSampling`.

    Args:
        logits: `[B, T, V]`.
        temperature: `[B]`.
        top_k: `[B]`.
        top_p: `[B]`.
        min_p: `[B]`.

    Returns:
        `[B, T, V]` float32 probabilities; one-hot at the first most probable token where the temperature is 0.
    """
    temperature, top_k, top_p, min_p = (x[:, None, None] for x in (temperature, top_k, top_p, min_p))
    is_greedy = temperature <= 0
    vocab_size = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    scaled = logits / jnp.where(is_greedy, 1.0, temperature)

    descending = -jnp.sort(-scaled, axis=-1)
    last = jnp.broadcast_to(jnp.clip(top_k - 1, 0, vocab_size - 1), (*logits.shape[:2], 1))
    smallest_kept = jnp.take_along_axis(descending, last, axis=-1)
    scaled = jnp.where((top_k > 0) & (scaled < smallest_kept), -jnp.inf, scaled)

    probs = jax.nn.softmax(scaled, axis=-1)
    descending = -jnp.sort(-probs, axis=-1)
    is_reached = jnp.cumsum(descending, axis=-1) >= top_p
    is_reached = is_reached.at[..., -1].set(True)
    smallest_kept = jnp.take_along_axis(descending, jnp.argmax(is_reached, axis=-1, keepdims=True), axis=-1)
    probs = jnp.where((top_p < 1) & (probs < smallest_kept), 0.0, probs)

    probs = jnp.where(probs < min_p * probs.max(axis=-1, keepdims=True), 0.0, probs)
    probs /= probs.sum(axis=-1, keepdims=True)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab_size, dtype=jnp.float32)
    return jnp.where(is_greedy, one_hot, probs)


def masked_acceptance(
    draft_tokens: jax.Array,
    num_drafted: jax.Array,
    target_logits: jax.Array,
    draft_probs: jax.Array | None,
    accept_keys: jax.Array,
    residual_keys: jax.Array,
    sampling: KernelSampling,
) -> KernelAcceptance:
    """Accepts drafts by rejection sampling (Leviathan et al. 2023, algorithm 1) with dense distributions.

    The arguments are those of `kernels_pallas.ops.masked_acceptance`.
    """
    batch, num_slots = draft_tokens.shape
    vocab_size = target_logits.shape[-1]
    target = target_probs(target_logits, *sampling)
    if draft_probs is None:
        draft_probs = jax.nn.one_hot(draft_tokens, vocab_size, dtype=jnp.float32)
    accept, residual_key = (jax.vmap(jax.random.wrap_key_data)(k) for k in (accept_keys, residual_keys))
    uniform = 1.0 - jax.vmap(lambda key: jax.random.uniform(key, (num_slots,)))(accept)
    token = draft_tokens[..., None]
    target_prob = jnp.take_along_axis(target[:, :num_slots], token, axis=2)[..., 0]
    draft_prob = jnp.take_along_axis(draft_probs, token, axis=2)[..., 0]
    is_accepted = (target_prob > 0) & (uniform * draft_prob <= target_prob)
    is_accepted &= jnp.arange(num_slots) < num_drafted[:, None]
    num_accepted = jnp.cumprod(is_accepted, axis=1).sum(axis=1).astype(jnp.int32)

    row = jnp.arange(batch)
    distribution = target[row, num_accepted]
    # Past the last draft nothing was rejected, so zeros are subtracted.
    rejected = jnp.concatenate([draft_probs, jnp.zeros((batch, 1, vocab_size))], axis=1)[row, num_accepted]
    rejected = jnp.where((num_accepted < num_drafted)[:, None], rejected, 0.0)
    residual = jnp.maximum(distribution - rejected, 0.0)
    distribution = jnp.where(residual.sum(axis=1, keepdims=True) > 0, residual, distribution)
    gumbel = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(residual_key)
    next_token = jnp.argmax(jnp.log(distribution) + gumbel, axis=1).astype(jnp.int32)

    raw = jax.nn.log_softmax(target_logits.astype(jnp.float32), axis=-1)
    emitted = jnp.concatenate([draft_tokens, jnp.zeros((batch, 1), jnp.int32)], axis=1)
    emitted = emitted.at[row, num_accepted].set(next_token)
    logprobs = jnp.take_along_axis(raw, emitted[..., None], axis=2)[..., 0]
    is_emitted = jnp.arange(num_slots + 1) <= num_accepted[:, None]
    is_valid = jnp.isfinite(jax.nn.logsumexp(target_logits.astype(jnp.float32), axis=-1))[row, num_accepted]
    return KernelAcceptance(num_accepted, next_token, jnp.where(is_emitted, logprobs, 0.0), is_valid)
