"""Causal attention within whole sequences, with its own gradient, for training.

The scores are computed block by block, and only for keys that a block's queries can see; this skips about half of the
products. The backward pass recomputes the weights from the normalizers of the scores and stores none (FlashAttention,
Dao et al. 2022).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.attention.arguments import ScoreOptions
from kernels_pallas.attention.packing import pack_rows, unpack_rows
from kernels_pallas.attention.scores import MASKED

_NUM_BLOCKS = 4
_BLOCK_MULTIPLE = 16


class _Layout(NamedTuple):
    """Static arguments of the differentiable function."""

    group: int  # query heads per kv head
    options: ScoreOptions


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attends from every token of a sequence to itself and the tokens before it.

    Products are summed in float32; with 16-bit inputs the weights are rounded to 16 bits. Padding after a sequence
    needs no mask, because no earlier token sees it.

    Args:
        q: `[B, T, N, H]` queries.
        k: `[B, K, T, H]` keys, K a divisor of N.
        v: `[B, K, T, H]` values.
        window: Number of positions that a query sees, itself included; None for all.
        chunk: c: a query at position p sees positions from `p // c * c` on; None for all.
        scale: Factor on the scores; `H ** -0.5` by default.
        soft_cap: c: a scaled score x becomes `c tanh(x / c)`; None for no cap.

    Returns:
        `[B, T, N, H]` in q's dtype.
    """
    _, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    options = ScoreOptions(window, head_dim**-0.5 if scale is None else scale, soft_cap, chunk)
    rows = pack_rows(q, num_kv_heads)
    return unpack_rows(_attend(_Layout(num_heads // num_kv_heads, options), rows, k, v), num_tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(layout: _Layout, rows: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attends from packed rows `[B, K, T * R, H]`."""
    return _forward(layout, rows, k, v)[0]


def _forward(layout: _Layout, rows, k, v):
    outs, normalizers = [], []
    for row_slice, key_slice in _blocks(layout, k.shape[2]):
        scores, _ = _scores_and_slope(layout, _products(rows[:, :, row_slice], k[:, :, key_slice]))
        scores = jnp.where(_visible(layout, row_slice, key_slice), scores, MASKED)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        mixed = jnp.einsum(
            "bkms,bksh->bkmh", weights.astype(v.dtype), v[:, :, key_slice], preferred_element_type=jnp.float32
        )
        outs.append((mixed / total).astype(rows.dtype))
        normalizers.append(top + jnp.log(total))
    out = jnp.concatenate(outs, axis=2)
    return out, (rows, k, v, out, normalizers)


def _backward(layout: _Layout, saved, gradient):
    rows, k, v, out, normalizers = saved
    rows_gradient = []
    k_gradient, v_gradient = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    # The gradient of a softmax subtracts the mean gradient of the row's weights from each of them.
    mean = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    for (row_slice, key_slice), normalizer in zip(_blocks(layout, k.shape[2]), normalizers, strict=True):
        block_rows, block_gradient, keys = rows[:, :, row_slice], gradient[:, :, row_slice], k[:, :, key_slice]
        scores, slope = _scores_and_slope(layout, _products(block_rows, keys))
        weights = jnp.where(_visible(layout, row_slice, key_slice), jnp.exp(scores - normalizer), 0.0)
        change = weights * (_products(block_gradient, v[:, :, key_slice]) - mean[:, :, row_slice]) * slope
        change = change.astype(rows.dtype)
        rows_gradient.append(jnp.einsum("bkms,bksh->bkmh", change, keys, preferred_element_type=jnp.float32))
        k_gradient = k_gradient.at[:, :, key_slice].add(_sum_over_rows(change, block_rows))
        v_gradient = v_gradient.at[:, :, key_slice].add(_sum_over_rows(weights.astype(rows.dtype), block_gradient))
    gradients = jnp.concatenate(rows_gradient, axis=2), k_gradient, v_gradient
    return tuple(found.astype(primal.dtype) for found, primal in zip(gradients, (rows, k, v), strict=True))


_attend.defvjp(_forward, _backward)


def _blocks(layout: _Layout, num_tokens: int) -> list[tuple[slice, slice]]:
    """Returns, for every block, its rows and the keys that they may see."""
    size = -(-num_tokens // (_NUM_BLOCKS * _BLOCK_MULTIPLE)) * _BLOCK_MULTIPLE
    group, window, chunk = layout.group, layout.options.window, layout.options.chunk
    blocks = []
    for start in range(0, num_tokens, size):
        end = min(start + size, num_tokens)
        first = 0 if window is None else max(0, start - window + 1)
        if chunk is not None:
            first = max(first, start // chunk * chunk)
        blocks.append((slice(start * group, end * group), slice(first, end)))
    return blocks


def _visible(layout: _Layout, row_slice: slice, key_slice: slice) -> jax.Array:
    token = jnp.arange(row_slice.start, row_slice.stop)[:, None] // layout.group
    position = jnp.arange(key_slice.start, key_slice.stop)
    visible = position <= token
    window, chunk = layout.options.window, layout.options.chunk
    if window is not None:
        visible &= position > token - window
    return visible if chunk is None else visible & (position >= token // chunk * chunk)


def _products(rows: jax.Array, keys: jax.Array) -> jax.Array:
    return jnp.einsum("bkmh,bksh->bkms", rows, keys, preferred_element_type=jnp.float32)


def _sum_over_rows(weights: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.einsum("bkms,bkmh->bksh", weights, rows, preferred_element_type=jnp.float32)


def _scores_and_slope(layout: _Layout, products: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Returns the scores of products, and the derivative of the scores by the products."""
    scale, soft_cap = layout.options.scale, layout.options.soft_cap
    scaled = products * scale
    if soft_cap is None:
        return scaled, scale
    shape = jnp.tanh(scaled / soft_cap)
    return soft_cap * shape, scale * (1.0 - shape * shape)
