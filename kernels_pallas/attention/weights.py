"""Softmax weights as tensor cores take them: two 16-bit terms instead of one."""

import jax
import jax.numpy as jnp
from jax import lax


def weight_terms(weights: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """Writes each weight as a sum of numbers of the values' type.

    A weight rounded to bfloat16 is off by 2^-9 of itself, and where the weighted values of an output cancel, that is
    many units in the last place of the output. Its first 8 bits and the next 8 as two terms, each multiplied by V and
    both added up in float32, are off by at most 2^-16.

    The first term is cut off by its bits rather than by a conversion and back, which XLA may take for the identity
    (`xla_allow_excess_precision`), leaving nothing for the second.

    Args:
        weights: float32, any shape, finite.
        dtype: bfloat16, float16 or float32.

    Returns:
        The terms in `dtype`, each of `weights`' shape, largest first: two of a 16-bit type, of float32 `weights` alone.
    """
    if dtype == jnp.float32:
        return (weights,)
    kept = jnp.uint32(0xFFFFFFFF << (23 - jnp.finfo(dtype).nmant) & 0xFFFFFFFF)
    bits = lax.bitcast_convert_type(weights, jnp.uint32) & kept
    first = lax.bitcast_convert_type(bits, jnp.float32)
    return first.astype(dtype), (weights - first).astype(dtype)
