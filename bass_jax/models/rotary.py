"""Rotary positions in half-split layout, with explicit positions per row."""

import math

import jax.numpy as jnp
import numpy as np

from bass_jax.models.model_config import RopeConfig, RopeScaling
from bass_jax.typing import Array, Float, Int


def frequencies(rope: RopeConfig, head_dim: int, context: int) -> np.ndarray:
    """Returns the angle per position of each rotated pair of lanes, ``[rotary_dim / 2]`` float32."""
    lanes = rope.rotary_dim or head_dim
    exponents = np.arange(0, lanes, 2, dtype=np.float32) / np.float32(lanes)
    inverse = (np.float32(1.0) / np.float32(rope.base) ** exponents).astype(np.float32)
    return inverse if rope.scaling is None else _scale(inverse, rope.scaling, rope.base, context)


def _scale(inverse: np.ndarray, scaling: RopeScaling, base: float, context: int) -> np.ndarray:
    if scaling.kind == "linear":
        return inverse / np.float32(scaling.factor)
    if scaling.kind == "yarn":
        return _scale_lanes(inverse, scaling, base)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if context > scaling.original_context else scaling.short_factors
        return inverse / np.asarray(factors, np.float32)
    wavelength = 2 * math.pi / inverse
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor or 1.0  # In Llama 4 Scout nothing is in between.
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / span
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = np.where(wavelength > longest, inverse / scaling.factor, inverse)
    is_between = (wavelength <= longest) & (wavelength >= shortest)
    return np.where(is_between, between, scaled).astype(np.float32)


def _scale_lanes(inverse: np.ndarray, scaling: RopeScaling, base: float) -> np.ndarray:
    """Scales as YaRN: keeps fast lanes, divides slow ones, and interpolates linearly in between."""
    half = len(inverse)

    def lane(num_rotations):
        return half * math.log(scaling.original_context / (num_rotations * 2 * math.pi)) / math.log(base)

    first, last = lane(scaling.beta_fast), lane(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    span = last - first or 0.001
    share = np.clip((np.arange(half, dtype=np.float32) - np.float32(first)) / np.float32(span), 0, 1)
    return (inverse / np.float32(scaling.factor) * share + inverse * (1 - share)).astype(np.float32)


def angles(
    positions: Int[Array, "B T"], rope: RopeConfig, head_dim: int, context: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Returns the cosine and sine of every position, float32, times the `attention_factor` of a scaling.

    `context` is that of the model; LongRoPE depends on it.
    """
    angle = positions[..., None].astype(jnp.float32) * frequencies(rope, head_dim, context)
    amplitude = None if rope.scaling is None else rope.scaling.attention_factor
    if amplitude is None or amplitude == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return amplitude * jnp.cos(angle), amplitude * jnp.sin(angle)


def rotate(
    x: Float[Array, "B T *heads H"], cosine: Float[Array, "B T half"], sine: Float[Array, "B T half"]
) -> Float[Array, "B T *heads H"]:
    """Rotates the pairs ``(x[i], x[i + half])``, in float32, and returns `x`'s dtype.

    Lanes from ``2 * half`` on are not rotated.
    """
    num_rotated = 2 * cosine.shape[-1]
    if num_rotated < x.shape[-1]:
        rotated = rotate(x[..., :num_rotated], cosine, sine)
        return jnp.concatenate([rotated, x[..., num_rotated:]], axis=-1)
    shape = cosine.shape[:2] + (1,) * (x.ndim - 3) + cosine.shape[2:]
    cosine, sine = cosine.reshape(shape), sine.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
