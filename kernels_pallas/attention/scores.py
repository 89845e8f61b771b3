"""Scores from products of queries and keys, in the base 2 of the kernels' softmax."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.attention.arguments import ScoreOptions

LOG2_E = 1.4426950408889634
"""Factor from natural units to units of base 2."""

MASKED = -1e30
"""Score of a position that a query does not see; finite, so that the difference of two masked maxima is not NaN."""


def base_two_scores(products: jax.Array, options: ScoreOptions) -> jax.Array:
    """Scales and caps float32 products, and divides them by `log 2` for the hardware's `exp2`."""
    if options.soft_cap is None:
        return products * (options.scale * LOG2_E)
    # tanh y = 1 - 2 / (e^2y + 1), with an absolute error of one float32 rounding. The hardware's own tanh is accurate
    # to 11 bits, which a cap of 50 would turn into an error of 0.02 in the exponent.
    power = jnp.exp2(products * (2.0 * LOG2_E * options.scale / options.soft_cap))
    return (options.soft_cap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))


def first_visible(length: jax.Array, options: ScoreOptions) -> jax.Array:
    """Returns the lowest position that a query at `length`, the first of a row, sees."""
    first = jnp.int32(0)
    if options.window is not None:
        first = jnp.maximum(length - (options.window - 1), 0)
    if options.chunk is not None:
        first = jnp.maximum(first, lax.div(length, jnp.int32(options.chunk)) * options.chunk)
    return first
