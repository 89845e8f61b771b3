"""Attention of whole sequences to themselves, with a gradient of its own: what a training runs.

Rows are scored block by block against the keys that they can see at all: about half of the products are never taken.
The backward pass computes the weights again from the scores' normalizer, as FlashAttention does (Dao et al. 2022), and
keeps none.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention.packing import pack_rows, unpack_rows

_NUM_BLOCKS = 4
_GRAIN = 16
_MASKED = -1e30


class CausalScores(NamedTuple):
    """How a score is made and masked; static.

    Attributes:
        group: query heads of a kv head.
        window: positions that a query sees, itself included; None for all.
        scale: factor on the scores.
        soft_cap: c, where a scaled score x becomes ``c tanh(x / c)``; None for none.
    """

    group: int
    window: int | None
    scale: float
    soft_cap: float | None


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attends from every token of a sequence to itself and those before it.

    Products are summed in float32; in 16 bits the weights are rounded to them. Padding behind a sequence needs no mask:
    no token before it sees it.

    Args:
        q: ``[B, T, N, H]`` queries.
        k: ``[B, K, T, H]`` keys, K a divisor of N.
        v: ``[B, K, T, H]`` values.
        window: positions that a query sees, itself included, or None for all.
        scale: factor on the scores; None means ``H ** -0.5``.
        soft_cap: c, where a scaled score x becomes ``c tanh(x / c)``, or None.

    Returns:
        ``[B, T, N, H]`` in q's dtype.
    """
    _, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    factor = head_dim**-0.5 if scale is None else scale
    scores = CausalScores(num_heads // num_kv_heads, window, factor, soft_cap)
    return unpack_rows(_attend(scores, pack_rows(q, num_kv_heads), k, v), num_tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scores: CausalScores, rows: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attends with packed rows ``[B, K, T * R, H]``."""
    return _forward(scores, rows, k, v)[0]


def _forward(scores: CausalScores, rows, k, v):
    outs, normalizers = [], []
    for of_rows, of_keys in _blocks(scores, k.shape[2]):
        raw = _products(rows[:, :, of_rows], k[:, :, of_keys])
        capped, _ = _capped(scores, raw)
        capped = jnp.where(_visible(scores, of_rows, of_keys), capped, _MASKED)
        top = capped.max(axis=-1, keepdims=True)
        weights = jnp.exp(capped - top)
        total = weights.sum(axis=-1, keepdims=True)
        mixed = jnp.einsum(
            "bkms,bksh->bkmh", weights.astype(v.dtype), v[:, :, of_keys], preferred_element_type=jnp.float32
        )
        outs.append((mixed / total).astype(rows.dtype))
        normalizers.append(top + jnp.log(total))
    out = jnp.concatenate(outs, axis=2)
    return out, (rows, k, v, out, normalizers)


def _backward(scores: CausalScores, saved, gradient):
    rows, k, v, out, normalizers = saved
    rows_gradient = []
    k_gradient, v_gradient = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    # The mean of a row's weights' gradients: what a softmax takes away from each of them.
    mean = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    for (of_rows, of_keys), normalizer in zip(_blocks(scores, k.shape[2]), normalizers, strict=True):
        own, given, keys = rows[:, :, of_rows], gradient[:, :, of_rows], k[:, :, of_keys]
        capped, slope = _capped(scores, _products(own, keys))
        weights = jnp.where(_visible(scores, of_rows, of_keys), jnp.exp(capped - normalizer), 0.0)
        change = weights * (_products(given, v[:, :, of_keys]) - mean[:, :, of_rows]) * slope
        change = change.astype(rows.dtype)
        rows_gradient.append(jnp.einsum("bkms,bksh->bkmh", change, keys, preferred_element_type=jnp.float32))
        k_gradient = k_gradient.at[:, :, of_keys].add(_summed_over_rows(change, own))
        v_gradient = v_gradient.at[:, :, of_keys].add(_summed_over_rows(weights.astype(rows.dtype), given))
    gradients = jnp.concatenate(rows_gradient, axis=2), k_gradient, v_gradient
    return tuple(found.astype(of.dtype) for found, of in zip(gradients, (rows, k, v), strict=True))


_attend.defvjp(_forward, _backward)


def _blocks(scores: CausalScores, num_tokens: int) -> list[tuple[slice, slice]]:
    """Rows and the keys that they may see, block by block."""
    size = -(-num_tokens // (_NUM_BLOCKS * _GRAIN)) * _GRAIN
    blocks = []
    for start in range(0, num_tokens, size):
        end = min(start + size, num_tokens)
        first = 0 if scores.window is None else max(0, start - scores.window + 1)
        blocks.append((slice(start * scores.group, end * scores.group), slice(first, end)))
    return blocks


def _visible(scores: CausalScores, of_rows: slice, of_keys: slice) -> jax.Array:
    token = jnp.arange(of_rows.start, of_rows.stop)[:, None] // scores.group
    position = jnp.arange(of_keys.start, of_keys.stop)
    visible = position <= token
    return visible if scores.window is None else visible & (position > token - scores.window)


def _products(rows: jax.Array, keys: jax.Array) -> jax.Array:
    return jnp.einsum("bkmh,bksh->bkms", rows, keys, preferred_element_type=jnp.float32)


def _summed_over_rows(weights: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.einsum("bkms,bkmh->bksh", weights, rows, preferred_element_type=jnp.float32)


def _capped(scores: CausalScores, products: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Scores of products, and the slope of one over the other."""
    scaled = products * scores.scale
    if scores.soft_cap is None:
        return scaled, scores.scale
    shape = jnp.tanh(scaled / scores.soft_cap)
    return scores.soft_cap * shape, scores.scale * (1.0 - shape * shape)
