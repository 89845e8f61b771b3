"""Query heads of one kv head as rows of one matrix, so that K and V are read once per kv head."""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas.attention.scores import LOG2_E


def pack_rows(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Groups the query heads by the kv head that they read.

    Row `t * R + r` of kv head `k` is head `k * R + r` at token `t`.

    Args:
        q: `[B, T, N, H]` queries.
        num_kv_heads: K, a divisor of N.

    Returns:
        `[B, K, T * R, H]` with R = N / K, in q's dtype.
    """
    batch, tokens, heads, head_dim = q.shape
    group = heads // num_kv_heads
    grouped = q.reshape(batch, tokens, num_kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    return grouped.reshape(batch, num_kv_heads, tokens * group, head_dim)


def unpack_rows(rows: jax.Array, num_tokens: int) -> jax.Array:
    """Inverts `pack_rows`: `[B, K, T * R, H]` to `[B, T, N, H]` with T = `num_tokens`."""
    batch, num_kv_heads, num_rows, head_dim = rows.shape
    group = num_rows // num_tokens
    grouped = rows.reshape(batch, num_kv_heads, num_tokens, group, head_dim).transpose(0, 2, 1, 3, 4)
    return grouped.reshape(batch, num_tokens, num_kv_heads * group, head_dim)


def pack_sinks(sinks: jax.Array, num_tokens: int, num_kv_heads: int) -> jax.Array:
    """Returns the sinks `[N]` of the rows of `pack_rows`: `[K, T * R]` float32."""
    of_tokens = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (1, num_tokens, sinks.shape[0], 1))
    return pack_rows(of_tokens, num_kv_heads)[0, ..., 0]


def combine_splits(out: jax.Array, row_max: jax.Array, row_sum: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Merges the partial softmaxes of C programs that share a row (Flash-Decoding, Dao et al. 2023).

    With `m = max_s m_s` the result is `sum_s 2^(m_s - m) out_s / sum_s 2^(m_s - m) l_s`. The base is 2 because the
    kernels use `exp2`. A row that saw no position gives zero. A sink is one more split, with a sum of 1 and no output.

    Args:
        out: `[C, ...rows, H]` float32 unnormalized partial outputs.
        row_max: `[C, ...rows]` float32 running maxima in base-2 units.
        row_sum: `[C, ...rows]` float32 running sums.
        sinks: float32 scores in natural units, of a shape that broadcasts to `[...rows]`; None for none.

    Returns:
        `[...rows, H]` float32.
    """
    # Unrolled over the splits, so that XLA makes one kernel of it, together with the caller's next operations.
    splits = range(out.shape[0])
    top = functools.reduce(jnp.maximum, [row_max[split] for split in splits])
    if sinks is not None:
        sinks = sinks * LOG2_E
        top = jnp.maximum(top, sinks)
    weights = [jnp.exp2(row_max[split] - top) for split in splits]
    total = sum(weights[split] * row_sum[split] for split in splits)
    if sinks is not None:
        total += jnp.exp2(sinks - top)
    mixed = sum(weights[split][..., None] * out[split] for split in splits)
    return mixed / jnp.where(total == 0.0, 1.0, total)[..., None]


def gather_pages(pages: jax.Array, tables: jax.Array) -> jax.Array:
    """Joins the pages of every row: `[P, K, page, ...]` and `[B, M]` to `[B, K, M * page, ...]`."""
    gathered = jnp.moveaxis(jnp.take(pages, tables, axis=0, mode="clip"), 1, 2)
    return gathered.reshape(*gathered.shape[:2], -1, *gathered.shape[4:])
