"""Top-k and top-p as a threshold on the logits, found by search instead of by sorting the vocabulary."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_BITS_PER_PASS = 2
# Bits of a float32 that a logit of this dtype can have set: sign, exponent and its own mantissa.
_NUM_BITS = {"float32": 32, "bfloat16": 16, "float16": 20}


def largest_threshold(
    masses: Callable[[list[jax.Array]], list[jax.Array]],
    needed: jax.Array,
    dtype: str,
    is_wanted: jax.Array,
    *,
    as_float: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """The largest value t with `mass(x >= t) >= needed`, digit by digit of its bit pattern.

    Read as integers, floats of one sign order as they do by value, so a search over bit patterns ends at the
    exact element of the vocabulary in a fixed number of passes, whatever the logits' scale. Each pass settles
    two bits from the masses above three candidates; more candidates per pass cost more arithmetic than they
    save reading.

    Args:
        masses: Given three thresholds of `needed`'s shape (float32, possibly NaN), the masses of the elements
            at or above each, float32; 0 for NaN.
        needed: `[...]` float32 mass to reach.
        dtype: Name of the logits' dtype, which limits the bits there are to settle.
        is_wanted: Scalar bool; where false nothing is read.
        as_float: Reinterprets 32 bits as a float32, where `lax` cannot.

    Returns:
        `[...]` float32 threshold, `-inf` where it is not wanted or where finite elements alone do not reach
        it.
    """
    as_float = as_float or functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)

    def settle(step, prefix):
        shift = jnp.uint32(32 - _BITS_PER_PASS) - step.astype(jnp.uint32) * jnp.uint32(_BITS_PER_PASS)
        candidates = [prefix + (jnp.uint32(digit) << shift) for digit in range(1, 1 << _BITS_PER_PASS)]
        enough = [mass >= needed for mass in masses([as_float(_bits_at(candidate)) for candidate in candidates])]
        # Masses fall as thresholds rise: the digit is the number of candidates that still have enough.
        digit = sum(is_enough.astype(jnp.uint32) for is_enough in enough)
        return prefix + (digit << shift)

    num_passes = is_wanted.astype(jnp.int32) * (_NUM_BITS[dtype] // _BITS_PER_PASS)
    prefix = lax.fori_loop(jnp.int32(0), num_passes, settle, jnp.zeros(needed.shape, jnp.uint32))
    threshold = as_float(_bits_at(prefix))
    return jnp.where(threshold == threshold, threshold, -jnp.inf)


def _bits_at(order: jax.Array) -> jax.Array:
    """The bits of the float32 at place `order` (uint32) among all floats by value; NaN at both ends."""
    sign = jnp.uint32(1 << 31)
    return jnp.where((order & sign) != 0, order ^ sign, ~order)
