"""Weights of matrix products, in the model's dtype or in INT8 with a scale per output channel.

A weight is stored as in Hugging Face checkpoints: output channels first, ``[*columns, D]``. A product with few rows is
fastest in this layout, because no implementation of it has to rearrange the weight.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models.parameters import declare
from bass_jax.runtime.cpu_workarounds import matmul
from bass_jax.typing import Array, Float, Int
from kernels_pallas.attention.quantize import quantize_kv

NUM_CONTRACTED = {"qkv": 1, "out": 3, "gate_up": 1, "up": 1, "down": 1, "head": 1, "embedding": 1} | {
    "experts_gate_up": 1,
    "experts_down": 1,
    "query_down": 1,
    "query_up": 1,
    "latent": 1,
    "kv_up": 1,
    "qkvz": 1,
}
"""The weights that can be quantized, with their number of trailing axes that a product sums over; the other axes are
output channels. They are the matrices of the layers and the head. The embedding is quantized if it is also the head."""

UNIFORM_DEVIATION = 73.3
"""Standard deviation of uniform integers from -127 to 127."""

_LEVELS = 127


class Weight(NamedTuple):
    """A weight of a product: output channels, then axes that are summed over."""

    values: Array  # in the model's dtype, or int8
    scale: Array | None  # float32 per output channel: the weight is `values * scale`; None for 1


def embed(embedding: Weight, tokens: Int[Array, "B T"], dtype: str) -> Float[Array, "B T E"]:
    """Returns the rows of an embedding. Padding ids such as -1 give some row, which is not to be used."""
    rows = jnp.clip(tokens, 0, embedding.values.shape[0] - 1)
    x = jnp.take(embedding.values, rows, axis=0)
    return x if embedding.scale is None else (x * embedding.scale[rows][..., None]).astype(dtype)


@functools.partial(jax.jit, static_argnames="num_contracted")
def quantize_weight(weight: Float[Array, "..."], num_contracted: int) -> tuple[Array, Array]:
    """Rounds a weight to INT8 with one symmetric scale per output channel.

    ``weight ~ values * scale`` with ``scale = max |weight| / 127`` over the summed axes, so the error of an element is
    at most half a scale.

    Args:
        weight: floating point; a product sums over the last `num_contracted` axes.
        num_contracted: see `NUM_CONTRACTED`.

    Returns:
        ``(values, scale)``: int8 of `weight`'s shape, and float32 per output channel.
    """
    wide = weight.astype(jnp.float32)
    summed = tuple(range(-num_contracted, 0))
    scale = jnp.abs(wide).max(axis=summed) / _LEVELS
    # A channel of zeros has scale 0 and is stored as zeros.
    values = jnp.round(wide / jnp.expand_dims(jnp.where(scale == 0.0, 1.0, scale), summed))
    return values.astype(jnp.int8), scale


def dequantize_weight(values: Array | np.ndarray, scale: Array | np.ndarray) -> Any:
    """Returns ``values * scale`` in float32, an array of JAX if one of them is."""
    return values * scale.reshape(scale.shape + (1,) * (values.ndim - scale.ndim))


def is_quantized(config: Any, name: str) -> bool:
    """Returns whether the weight called `name` is INT8 in a model of `config`."""
    if config.quantize is None or name not in NUM_CONTRACTED:
        return False
    return name != "embedding" or config.is_tied


def declare_weight(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Weight:
    """Declares a weight of `module`, INT8 if its `config` says so; the scale is called ``{name}_scale``."""
    # The embedding of a draft may be that of an INT8 target.
    is_shared = module.has_variable("params", f"{name}_scale")
    if not is_shared and not is_quantized(module.config, name):  # type: ignore[attr-defined]
        return Weight(declare(module, name, shape, axes), None)
    kept = len(shape) - NUM_CONTRACTED[name]
    values = declare(module, name, shape, axes, draw_int8, dtype=jnp.int8)
    constant = nn.initializers.constant(0.02 / UNIFORM_DEVIATION)
    return Weight(values, declare(module, f"{name}_scale", shape[:kept], axes[:kept], constant, dtype=jnp.float32))


def multiply(
    x: Float[Array, "*rows D"],
    weight: Weight,
    *,
    factor: Float[Array, "*rows"] | None = None,
    dtype: Any = None,
    rounds_to: str | None = None,
) -> Float[Array, "..."]:
    """Returns the product of `x` and a weight, ``[*rows, *columns]``, summed in float32.

    INT8 values are cast inside the product, so that XLA fuses the cast and stores no cast copy of the weight. Scales
    are applied to the result.

    Args:
        x: the input.
        weight: ``[*columns, D]``.
        factor: factor of each row of the result; None for 1.
        dtype: of the result before `factor` is applied; `x`'s by default. With an INT8 weight it is float32.
        rounds_to: ``"int8"`` rounds each row of `x` to INT8 and sums in integers if the weight is INT8;
            ``"bfloat16"`` is for other weights, see `product`.
    """
    if weight.scale is None:
        y = product(x, weight.values, dtype, rounds_to)
    elif rounds_to == "int8":
        rounded, scale = quantize_kv(x)
        y = jnp.tensordot(rounded, weight.values, ((-1,), (-1,)), preferred_element_type=jnp.int32)
        y = y.astype(jnp.float32) * weight.scale
        factor = scale if factor is None else scale * factor
    else:
        y = product(x, weight.values.astype(x.dtype), jnp.float32) * weight.scale
    return y if factor is None else y * factor.reshape(factor.shape + (1,) * (y.ndim - factor.ndim))


def product(
    x: Float[Array, "*rows D"], values: Float[Array, "*columns D"], dtype: Any = None, rounds_to: str | None = None
) -> Array:
    """Returns ``[*rows, *columns]`` in `dtype`, by default `x`'s.

    With `rounds_to` ``"bfloat16"``, float32 inputs are rounded as in `_rounded_product`.
    """
    # As matrices, because the gradient of a product with more axes sums over several axes at once, which takes ten
    # times as long on a CPU.
    rows, matrix = (one.reshape(-1, one.shape[-1]) for one in (x, values))
    if rounds_to == "bfloat16" and rows.dtype == matrix.dtype == jnp.float32:
        y = _rounded_product(rows, matrix).astype(dtype or x.dtype)
    else:
        y = matmul(rows, matrix, dtype)
    return y.reshape(x.shape[:-1] + values.shape[:-1])


@jax.custom_vjp
def _rounded_product(rows: Float[Array, "M D"], matrix: Float[Array, "C D"]) -> Float[Array, "M C"]:
    """Multiplies inputs rounded to bfloat16 and sums in float32; the gradient by `rows` does the same.

    The gradient by `matrix` is that of an exact product, because the optimizer accumulates it. Rounding it would not
    make it faster on a CPU with AVX-512 BF16, where the other two products take 1.4 to 2 times less time than in
    float32.
    """
    return matmul(_rounded(rows), _rounded(matrix), jnp.float32)


def _rounded_product_forward(rows, matrix):
    return _rounded_product(rows, matrix), (rows, matrix)


def _rounded_product_backward(saved, gradient):
    rows, matrix = saved
    of_rows = jnp.dot(_rounded(gradient), _rounded(matrix), preferred_element_type=jnp.float32)
    return of_rows, jnp.dot(gradient.T, rows)


_rounded_product.defvjp(_rounded_product_forward, _rounded_product_backward)


def _rounded(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(jnp.bfloat16)


def draw_int8(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns random uniform values of an INT8 weight."""
    return jax.random.randint(key, shape, -_LEVELS, _LEVELS + 1, dtype)
