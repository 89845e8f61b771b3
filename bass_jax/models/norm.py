"""Norms of the residual stream and of the heads of queries and keys."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bass_jax.models.model_config import NormConfig
from bass_jax.models.parameters import declare, ones, zeros
from bass_jax.models.weights import Weight, multiply
from bass_jax.typing import Array, Float


class Normed(NamedTuple):
    """A normalized input of projections. Its factor per token may be applied to their results instead."""

    values: Array  # [B, T, D]
    factor: Array | None  # [B, T] float32: the input is `values * factor[..., None]`; None for 1


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, "... D"], eps: float, offset: float = 0.0
) -> Float[Array, "... D"]:
    """Divides by the root mean square, in float32, and returns `x`'s dtype.

    With an `offset` (1 in Gemma) the factor is ``offset + scale``, applied in float32.
    """
    wide = x.astype(jnp.float32)
    normed = wide * _inverse_rms(wide, eps)[..., None]
    if offset:
        return (normed * (offset + scale.astype(jnp.float32))).astype(x.dtype)
    return (normed.astype(x.dtype) * scale).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, "... D"], bias: Float[Array, "... D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Subtracts the mean and divides by the standard deviation, in float32, and returns `x`'s dtype.

    `scale` and `bias` are broadcast to `x`, whose last axis is normalized.
    """
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    scaled = normed * scale.astype(jnp.float32)
    return (scaled if bias is None else scaled + bias.astype(jnp.float32)).astype(x.dtype)


def declare_norm(
    module: nn.Module, name: str, norm: NormConfig, *shape: int, axis: str | None = "embed"
) -> tuple[Array, Array | None]:
    """Declares the parameters of a norm: its scale, and its bias or None.

    Args:
        module: a module with a `config`.
        name: of the scale; the bias is ``{name}_bias``.
        norm: its kind.
        shape: of the scale; the last axis is normalized.
        axis: logical name of the normalized axis.
    """
    axes = (*(None for _ in shape[1:]), axis)
    scale = declare(module, name, shape, axes, zeros if norm.kind == "rms" and norm.offset else ones)
    has_bias = norm.kind == "layer" and norm.has_bias
    return scale, declare(module, f"{name}_bias", shape, axes, zeros) if has_bias else None


def apply_norm(norm: NormConfig, x: Float[Array, "... D"], learned: tuple) -> Float[Array, "... D"]:
    """Normalizes with the parameters that `declare_norm` returned."""
    if norm.kind == "rms":
        return rms_norm(x, learned[0], norm.eps, norm.offset)
    return layer_norm(x, learned[0], learned[1], norm.eps)


def norm_for_projections(norm: NormConfig, x: Float[Array, "B T D"], learned: tuple) -> Normed:
    """Normalizes with the parameters that `declare_norm` returned, but leaves an RMS norm's division to `project`.

    A row of a product can be scaled before or after the product. If it is scaled after, the sum of squares is not on
    the path between two products, and on a GPU it is computed in one kernel with the addition to the residual stream.
    """
    if norm.kind != "rms" or norm.offset:
        return Normed(apply_norm(norm, x, learned), None)
    return Normed((x * learned[0]).astype(x.dtype), _inverse_rms(x.astype(jnp.float32), norm.eps))


def project(x: Normed, weight: Weight, *, rounds_to: str | None = None) -> Float[Array, "B T ..."]:
    """Returns the product of a normalized input and a weight, in the input's dtype, summed in float32.

    `rounds_to` is that of `bass_jax.models.weights.multiply`.
    """
    y = multiply(x.values, weight, factor=x.factor, dtype=jnp.float32, rounds_to=rounds_to)
    return y.astype(x.values.dtype)


def _inverse_rms(wide: Float[Array, "... D"], eps: float) -> Float[Array, "..."]:
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
