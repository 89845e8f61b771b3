"""The INT8 form of a KV cache."""

import jax
import jax.numpy as jnp


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
    # A vector of zeros has scale 0 and is stored as zeros.
    rounded = jnp.round(values / jnp.where(scale == 0.0, 1.0, scale)[..., None])
    return rounded.astype(jnp.int8), scale
