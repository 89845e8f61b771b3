"""Softmax weights for 16-bit tensor cores: two 16-bit terms instead of one."""

import jax
import jax.numpy as jnp
from jax import lax


def weight_terms(weights: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """Writes each weight as a sum of numbers of `dtype`.

    A weight rounded to bfloat16 has a relative error of 2^-9. Where the weighted values of an output cancel, that is
    many units in the last place of the output. Two terms, each multiplied by V and added in float32, have a relative
    error of at most 2^-16.

    The first term is truncated by masking bits. XLA may remove a conversion to 16 bits and back
    (`xla_allow_excess_precision`), and the second term would then be 0.

    Args:
        weights: float32, any shape, finite.
        dtype: bfloat16, float16 or float32.

    Returns:
        The terms in `dtype`, each of `weights`' shape, the larger first; `weights` itself for float32.
    """
    if dtype == jnp.float32:
        return (weights,)
    kept = jnp.uint32(0xFFFFFFFF << (23 - jnp.finfo(dtype).nmant) & 0xFFFFFFFF)
    bits = lax.bitcast_convert_type(weights, jnp.uint32) & kept
    first = lax.bitcast_convert_type(bits, jnp.float32)
    return first.astype(dtype), (weights - first).astype(dtype)
