"""One facade per op: validate, choose an implementation, fall through where one cannot."""

from typing import Literal

import jax
import jax.numpy as jnp

from kernels_pallas.attention.xla import ragged_attention_xla

Form = Literal["pad", "split", "ragged"]
Implementation = Literal["mosaic_gpu", "triton", "xla"]

FORMS: tuple[Form, ...] = ("pad", "split", "ragged")
ATTENTION_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def ragged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    form: Form = "ragged",
    num_queries: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    is_cache_finite: bool = False,
) -> jax.Array:
    """Attention of T new tokens per row over a cache whose rows have different lengths.

    The caches already hold the new tokens at `lengths[b] ... lengths[b] + T - 1`; query t of row b sees positions up to
    `lengths[b] + t`. Cache positions past a row's last real query are never used, whatever bits they hold.

    Args:
        q: `[B, T, N, H]` float32, bfloat16 or float16 queries.
        k_cache: `[B, K, S, H]` keys in q's dtype, or int8 with `k_scale`. Query head n reads kv head `n // (N / K)`.
        v_cache: `[B, K, S, H]` values, like `k_cache`.
        lengths: `[B]` integer tokens in the cache before the new ones, clipped to `0 ... S`. The real queries' own
            positions must lie in the cache: `lengths[b] + num_queries[b] <= S`.
        form: `"pad"`: one launch, every row walks to the longest row's end; `"split"`: one launch per row, each its own
            length (the two of BASS, Qian et al. 2024, figure 4); `"ragged"`: one launch, every program walks its own
            row only. XLA has one form and ignores this.
        num_queries: `[B]` integer number of real queries among the T, all T where None; outputs of the others are zero.
        window: Number of positions a query sees, itself included; None for all.
        scale: Factor on the scores; `H ** -0.5` where None.
        implementation: `"mosaic_gpu"`, `"triton"` or `"xla"`; None takes the best that can.
        interpret: Run the kernel's interpreter, on any device; for tests.
        k_scale: `[B, K, S]` float32 scale per (head, token) of an int8 `k_cache`.
        v_scale: `[B, K, S]` float32 scale per (head, token) of an int8 `v_cache`.
        is_cache_finite: The caller vouches that no position of its caches holds NaN or infinity, written or not, as
            after zeroing them when they were made; XLA then skips masking V.

    Returns:
        `[B, T, N, H]` in q's dtype.

    Raises:
        ValueError: An argument's shape, dtype or value is not as above.
        NotImplementedError: `implementation` was named and cannot run these shapes.
    """
    _check_attention(q, k_cache, v_cache, lengths, form, num_queries, window, implementation, k_scale, v_scale)
    batch, num_tokens, _, head_dim = q.shape
    # A finished row may carry any length; clipped, it cannot send a kernel outside its cache.
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, k_cache.shape[2])
    if num_queries is None:
        num_queries = jnp.full((batch,), num_tokens, jnp.int32)
    num_queries = jnp.clip(num_queries.astype(jnp.int32), 0, num_tokens)
    return ragged_attention_xla(
        q,
        k_cache,
        v_cache,
        lengths,
        num_queries,
        window=window,
        scale=head_dim**-0.5 if scale is None else scale,
        k_scale=k_scale,
        v_scale=v_scale,
        is_cache_finite=is_cache_finite,
    )


def quantize_kv(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds keys or values to int8 with one symmetric scale per (token, head).

    `values ~ int8 * scale[..., None]` with `scale = max |values| / 127` over the head dimension, so the error of an
    element is at most `scale / 2`.

    Args:
        values: `[..., H]` floating point; `[B, K, S, H]` for a cache.

    Returns:
        int8 `[..., H]` and float32 scales `[...]`.
    """
    values = values.astype(jnp.float32)
    scale = jnp.abs(values).max(axis=-1) / 127.0
    # An all-zero vector has scale 0 and is stored as zeros.
    rounded = jnp.round(values / jnp.where(scale == 0.0, 1.0, scale)[..., None])
    return rounded.astype(jnp.int8), scale


def _check_attention(q, k_cache, v_cache, lengths, form, num_queries, window, implementation, k_scale, v_scale):
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}; expected [B, T, N, H]")
    batch, num_tokens, num_heads, head_dim = q.shape
    if k_cache.ndim != 4 or k_cache.shape[0] != batch or k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache has shape {k_cache.shape}; expected [{batch}, K, S, {head_dim}]")
    num_kv_heads, capacity = k_cache.shape[1:3]
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache has shape {v_cache.shape}; expected k_cache's {k_cache.shape}")
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads; expected a multiple of k_cache's {num_kv_heads}")
    if num_tokens > capacity:
        raise ValueError(f"q has {num_tokens} new tokens; expected at most the cache's capacity {capacity}")
    if q.dtype not in ATTENTION_DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; expected float32, bfloat16 or float16")
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache has dtype {v_cache.dtype}; expected k_cache's {k_cache.dtype}")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale go together; one of them is None")
    expected_dtype = q.dtype if k_scale is None else jnp.int8
    if k_cache.dtype != expected_dtype:
        raise ValueError(f"k_cache has dtype {k_cache.dtype}; expected {jnp.dtype(expected_dtype).name}")
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None and scales.shape != k_cache.shape[:3]:
            raise ValueError(f"{name} has shape {scales.shape}; expected {k_cache.shape[:3]}")
    for name, counts in (("lengths", lengths), ("num_queries", num_queries)):
        if counts is None:
            continue
        if counts.shape != (batch,):
            raise ValueError(f"{name} has shape {counts.shape}; expected [{batch}]")
        if not jnp.issubdtype(counts.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {counts.dtype}; expected an integer type")
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; expected one of {FORMS}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected a positive number of positions")
    if implementation not in (None, "mosaic_gpu", "triton", "xla"):
        raise ValueError(f"implementation is {implementation!r}; expected 'mosaic_gpu', 'triton', 'xla' or None")
