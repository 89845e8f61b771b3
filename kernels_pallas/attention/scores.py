"""What becomes of a product of a query and a key before the softmax, in the kernels' base 2."""

import jax
import jax.numpy as jnp

_LOG2_E = 1.4426950408889634


def base_two_scores(products: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scales, caps and changes the base of the exponential from e to 2, which the hardware computes directly.

    Args:
        products: float32 products of queries and keys.
        scale: Factor on them.
        soft_cap: c, where a scaled score x becomes `c tanh(x / c)` (Gemma 2), or None.

    Returns:
        float32 like `products`, to be exponentiated by `exp2`.
    """
    if soft_cap is None:
        return products * (scale * _LOG2_E)
    # 1 - 2 / (e^2y + 1) is tanh y with an absolute error of one float32 rounding; the hardware's own tanh is good to
    # 11 bits, which a cap of 50 would turn into an error of 0.02 in the exponent.
    power = jnp.exp2(products * (2.0 * _LOG2_E * scale / soft_cap))
    return (soft_cap * _LOG2_E) * (1.0 - 2.0 / (power + 1.0))
