"""Normalization of the residual stream, and of the heads of queries and keys."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bass_jax.models.model_config import ModelConfig
from bass_jax.models.parameters import declare, ones, zeros
from bass_jax.models.weights import Weight, multiply
from bass_jax.typing import Array, Float


class Normed(NamedTuple):
    """A normalized input of projections, whose factor per token may be applied after them."""

    values: Array  # [B, T, D]
    factor: Array | None  # [B, T] float32: the input is `values * factor[..., None]`; None for 1


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float, offset: float = 0.0
) -> Float[Array, "... D"]:
    """Divides by the root mean square, in float32, and returns `x`'s dtype.

    With an `offset` (Gemma's 1), the factor is ``offset + scale``, applied in float32.
    """
    wide = x.astype(jnp.float32)
    normed = wide * _inverse_rms(wide, eps)[..., None]
    if offset:
        return (normed * (offset + scale.astype(jnp.float32))).astype(x.dtype)
    return (normed.astype(x.dtype) * scale).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... D"], scale: Float[Array, "D"], bias: Float[Array, "D"], eps: float
) -> Float[Array, "... D"]:
    """Takes the mean away and divides by the standard deviation, in float32, and returns `x`'s dtype."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def declare_norm(module: nn.Module, name: str, size: int | None = None) -> tuple:
    """Declares what a norm of the module's configuration learns: ``(scale,)`` or ``(scale, bias)``.

    Args:
        module: with a `config`.
        name: of the scale; the bias is ``{name}_bias``.
        size: of a head, for an RMS norm of queries or keys; default the width.
    """
    config: ModelConfig = module.config  # type: ignore[attr-defined]
    axes = ("embed",) if size is None else (None,)
    if config.norm == "rms" or size is not None:
        initializer = zeros if config.norm_offset else ones
        return (declare(module, name, (size or config.width,), axes, initializer),)
    scale = declare(module, name, (config.width,), axes, ones)
    return scale, declare(module, f"{name}_bias", (config.width,), axes, zeros)


def apply_norm(config: ModelConfig, x: Float[Array, "... D"], learned: tuple) -> Float[Array, "... D"]:
    """Normalizes with what `declare_norm` declared."""
    if len(learned) == 1:
        return rms_norm(x, learned[0], config.norm_eps, config.norm_offset)
    return layer_norm(x, learned[0], learned[1], config.norm_eps)


def norm_for_projections(config: ModelConfig, x: Float[Array, "B T D"], learned: tuple) -> Normed:
    """Normalizes with what `declare_norm` declared, leaving an RMS norm's division to `project`.

    A row of a product may be scaled before or after it. After it, the sum of squares is no step between two products:
    on a GPU it joins the residual's addition in one kernel.
    """
    if len(learned) != 1 or config.norm_offset:
        return Normed(apply_norm(config, x, learned), None)
    return Normed((x * learned[0]).astype(x.dtype), _inverse_rms(x.astype(jnp.float32), config.norm_eps))


def project(x: Normed, weight: Weight, *, rounds_to: str | None = None) -> Float[Array, "B T ..."]:
    """Returns the product of a normalized input and a weight, in the input's dtype, accumulated in float32.

    `rounds_to` is that of `bass_jax.models.weights.multiply`.
    """
    y = multiply(x.values, weight, factor=x.factor, dtype=jnp.float32, rounds_to=rounds_to)
    return y.astype(x.values.dtype)


def _inverse_rms(wide: Float[Array, "... D"], eps: float) -> Float[Array, "..."]:
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
