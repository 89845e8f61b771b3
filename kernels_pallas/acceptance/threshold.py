"""Top-k and top-p as a threshold on the logits, found by binary search instead of by sorting the vocabulary."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_BITS_PER_PASS = 2
# Leading bits of a float32 that a logit of this dtype can set: the sign, the exponent and the dtype's mantissa.
_NUM_BITS = {"float32": 32, "bfloat16": 16, "float16": 20}


def largest_threshold(
    masses: Callable[[list[jax.Array]], list[jax.Array]],
    needed: jax.Array,
    dtype: str,
    is_wanted: jax.Array,
    *,
    as_float: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Returns the largest t with `mass(x >= t) >= needed`, searching its bits from the most significant one.

    The bits of floats of one sign, read as integers, are ordered as the floats are. The search over bits therefore
    finds an exact element of the vocabulary in a fixed number of passes, for logits of any scale. Each pass determines
    two bits from the masses above three candidates; more candidates per pass cost more arithmetic than they save in
    reading.

    Args:
        masses: A function from three thresholds of `needed`'s shape (float32, possibly NaN) to the masses of the
            elements at or above each of them, float32; 0 for NaN.
        needed: `[...]` float32 mass to reach.
        dtype: Name of the logits' dtype, which limits the number of bits to search.
        is_wanted: Scalar bool; if False, `masses` is not called at run time.
        as_float: Reinterprets 32 bits as a float32, in dialects where `lax` cannot.

    Returns:
        `[...]` float32 threshold; `-inf` if it is not wanted or if all finite elements together have too little mass.
    """
    as_float = as_float or functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)

    def add_bits(step, prefix):
        shift = jnp.uint32(32 - _BITS_PER_PASS) - step.astype(jnp.uint32) * jnp.uint32(_BITS_PER_PASS)
        candidates = [prefix + (jnp.uint32(digit) << shift) for digit in range(1, 1 << _BITS_PER_PASS)]
        enough = [mass >= needed for mass in masses([as_float(bits_at(candidate)) for candidate in candidates])]
        # Masses decrease as thresholds increase, so the digit is the number of candidates with enough mass.
        digit = sum(is_enough.astype(jnp.uint32) for is_enough in enough)
        return prefix + (digit << shift)

    num_passes = is_wanted.astype(jnp.int32) * (_NUM_BITS[dtype] // _BITS_PER_PASS)
    prefix = lax.fori_loop(jnp.int32(0), num_passes, add_bits, jnp.zeros(needed.shape, jnp.uint32))
    threshold = as_float(bits_at(prefix))
    return jnp.where(threshold == threshold, threshold, -jnp.inf)


def bits_at(order: jax.Array) -> jax.Array:
    """Returns the bits of the float32 at place `order` (uint32) of all floats in ascending order; NaN at both ends."""
    sign = jnp.uint32(1 << 31)
    return jnp.where((order & sign) != 0, order ^ sign, ~order)
