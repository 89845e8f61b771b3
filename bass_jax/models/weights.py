"""Weights of products: in the model's dtype, or INT8 with a scale per output channel."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from bass_jax.models.parameters import declare
from bass_jax.typing import Array, Float
from kernels_pallas.attention.quantize import quantize_kv
from kernels_pallas.targets import current_target

NUM_CONTRACTED = {"qkv": 1, "out": 3, "gate_up": 1, "up": 1, "down": 1, "head": 1, "embedding": 1}
"""Leading axes of each weight that a product sums over; the others are its output channels. These are the weights that
are quantized: every matrix of a layer, and the head. (The embedding is one where it is the head too.)"""

_LEVELS = 127
_MAX_PARTS = 4
"""Of the sum of a product of one row: on two cores 2, 4 and 8 are equally fast."""
UNIFORM_DEVIATION = 73.3
"""Standard deviation of whole numbers from -127 to 127."""


class Weight(NamedTuple):
    """A matrix of a product: axes that are summed over, then output channels."""

    values: Array  # in the model's dtype, or int8
    scale: Array | None  # of the output channels, float32: the weight is `values * scale`; None for 1


def quantize_weight(weight: Float[Array, "..."], num_contracted: int) -> tuple[Array, Array]:
    """Rounds a weight to INT8 with one symmetric scale per output channel.

    ``weight ~ values * scale`` with ``scale = max |weight| / 127`` over the summed axes: an element is off by at most
    half a scale.

    Args:
        weight: floating point; the first `num_contracted` axes are those that a product sums over.
        num_contracted: see `NUM_CONTRACTED`.

    Returns:
        ``(values, scale)``: int8 of `weight`'s shape and float32 of its output channels.
    """
    wide = weight.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=tuple(range(num_contracted))) / _LEVELS
    # A channel of zeros has scale 0 and is stored as zeros.
    values = jnp.round(wide / jnp.where(scale == 0.0, 1.0, scale))
    return values.astype(jnp.int8), scale


def is_quantized(config: Any, name: str) -> bool:
    """Whether the weight called `name` is INT8 in a model of `config`."""
    if config.quantize is None or name not in NUM_CONTRACTED:
        return False
    return name != "embedding" or config.is_tied


def declare_weight(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Weight:
    """Declares a weight of `module`, as its `config` stores it; the scale is called ``{name}_scale``."""
    is_shared = module.has_variable("params", f"{name}_scale")  # A draft's embedding may be that of an INT8 target.
    if not is_shared and not is_quantized(module.config, name):  # type: ignore[attr-defined]
        return Weight(declare(module, name, shape, axes), None)
    kept = NUM_CONTRACTED[name]
    values = declare(module, name, shape, axes, draw_int8, dtype=jnp.int8)
    spread = nn.initializers.constant(0.02 / UNIFORM_DEVIATION)
    return Weight(values, declare(module, f"{name}_scale", shape[kept:], axes[kept:], spread, dtype=jnp.float32))


def multiply(
    x: Float[Array, "*rows D"],
    weight: Weight,
    *,
    factor: Float[Array, "*rows"] | None = None,
    dtype: Any = None,
    rounds_to: str | None = None,
) -> Float[Array, "..."]:
    """Returns the product of `x` and a weight, ``[*rows, *columns]``, summed in float32.

    INT8 values are cast where the product reads them, so that XLA does so inside its loop and no cast copy of the
    weight exists; scales are applied to the result.

    Args:
        x: the input.
        weight: ``[D, *columns]``.
        factor: of each row of the result, beside the weight's scale; None for 1.
        dtype: of the result before its factor; default `x`'s. Of an INT8 weight it is float32.
        rounds_to: ``"int8"``, of an INT8 weight: round each row of `x` to INT8 too, and sum in whole numbers;
            ``"bfloat16"``, of another: see `product`.
    """
    if weight.scale is None:
        y = product(x, weight.values, dtype, rounds_to)
    elif rounds_to == "int8":
        rounded, size = quantize_kv(x)
        # On a GPU XLA wants the summed axis of such a matrix innermost. Without the constraint it would say so of the
        # weight as it is stored, and write a copy in every pass (jax 0.12, 2026-11); a matrix the product transposes.
        matrix = weight.values.reshape(x.shape[-1], -1)
        matrix = with_layout_constraint(matrix, Layout(major_to_minor=(0, 1)))
        y = jnp.dot(rounded, matrix, preferred_element_type=jnp.int32).astype(jnp.float32)
        y = y.reshape(*x.shape[:-1], *weight.values.shape[1:])
        y *= weight.scale
        factor = size if factor is None else size * factor
    else:
        y = jnp.tensordot(x, weight.values.astype(x.dtype), 1, preferred_element_type=jnp.float32)
        y *= weight.scale
    return y if factor is None else y * factor.reshape(factor.shape + (1,) * (y.ndim - factor.ndim))


def product(
    x: Float[Array, "*rows D"], values: Float[Array, "D *columns"], dtype: Any = None, rounds_to: str | None = None
) -> Array:
    """Returns ``[*rows, *columns]`` in `dtype`, default `x`'s.

    Taken between matrices: the gradient of one with more axes sums over several at once, ten times slower on a CPU.
    With `rounds_to` ``"bfloat16"`` float32 inputs are rounded, see `_rounded_product`.
    """
    rows, matrix = x.reshape(-1, x.shape[-1]), values.reshape(len(values), -1)
    if rounds_to == "bfloat16" and rows.dtype == matrix.dtype == jnp.float32:
        y = _rounded_product(rows, matrix).astype(dtype or x.dtype)
    elif (parts := _parts(rows, matrix)) > 1:
        summed = jnp.einsum("pd,pdc->pc", rows.reshape(parts, -1), matrix.reshape(parts, -1, matrix.shape[1]))
        y = summed.sum(axis=0).astype(dtype or x.dtype)
    else:
        y = jnp.dot(rows, matrix, preferred_element_type=dtype)
    return y.reshape(x.shape[:-1] + values.shape[1:])


@jax.custom_vjp
def _rounded_product(rows: Float[Array, "M D"], matrix: Float[Array, "D C"]) -> Float[Array, "M C"]:
    """Sums products of inputs rounded to bfloat16 in float32; so does the gradient by `rows`.

    The gradient by `matrix` is that of an exact product: it is what an optimizer adds up, and a CPU with AVX-512 BF16,
    which computes the other two 1.4 to 2 times as fast as in float32, gains nothing here.
    """
    return jnp.dot(_rounded(rows), _rounded(matrix), preferred_element_type=jnp.float32)


def _rounded_product_forward(rows, matrix):
    return _rounded_product(rows, matrix), (rows, matrix)


def _rounded_product_backward(saved, gradient):
    rows, matrix = saved
    # Not a product with the transpose, which XLA for a CPU writes out first.
    of_rows = jnp.einsum("mc,dc->md", _rounded(gradient), _rounded(matrix), preferred_element_type=jnp.float32)
    return of_rows, jnp.dot(rows.T, gradient)


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_backward)


def _rounded(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(jnp.bfloat16)


def _parts(rows: Float[Array, "M D"], matrix: Float[Array, "D C"]) -> int:
    """How many parts a product's sum is cut into.

    XLA for a CPU computes a product of one row on one core, which cannot read the matrix as fast as several can; a
    product with a batch axis it shares among them. A mesh cuts in its own way, and more rows are shared anyway.
    """
    is_alone = len(rows) == 1 and rows.dtype == matrix.dtype == jnp.float32
    if not is_alone or not jax.sharding.get_abstract_mesh().empty or current_target().platform != "cpu":
        return 1
    return math.gcd(len(matrix), _MAX_PARTS)


def draw_int8(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draws the values of a random INT8 weight, evenly."""
    return jax.random.randint(key, shape, -_LEVELS, _LEVELS + 1, dtype)
