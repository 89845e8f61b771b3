"""Quantizes a checkpoint's weights as they are read, one at a time."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models import abstract_params
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.weights import NUM_CONTRACTED, is_quantized, quantize_weight
from bass_jax.runtime.trees import flatten
from bass_jax.typing import Array

_SCALE = "_scale"


def stored_dtype(config: ModelConfig, path: str) -> np.dtype:
    """What a tensor is read as: what is to be quantized is not rounded to 16 bits first."""
    return np.dtype(np.float32) if is_quantized(config, _name(path)) else jnp.dtype(config.dtype)


def quantizing(builders: dict[str, Callable[[], np.ndarray]], config: ModelConfig) -> dict[str, Callable]:
    """Returns builders of every parameter of `config`, which quantizes some of what `builders` make.

    A weight is built once for its values and its scale, if these are asked for before the next one's.

    Args:
        builders: our path of every parameter of the model without quantization → a function that makes it.
        config: of the model.
    """
    if config.quantize is None:
        return builders

    @functools.lru_cache(maxsize=1)
    def both(path: str) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(part) for part in quantize(path, builders[path]()))

    def builder(path: str) -> Callable:
        if path in builders and not is_quantized(config, _name(path)):
            return builders[path]
        weight = path.removesuffix(_SCALE)
        return lambda: both(weight)[int(path != weight)]

    return {path: builder(path) for path in flatten(abstract_params(config))}


def quantize_read(config: ModelConfig, path: str, array: Array) -> dict[str, Array]:
    """Returns what `config` keeps of a weight that was read without quantization, by path."""
    if not is_quantized(config, _name(path)):
        return {path: array}
    values, scale = quantize(path, array)
    return {path: values, path + _SCALE: scale}


def widen(params: dict[str, Array], config: ModelConfig) -> dict[str, Array]:
    """Returns weights by their path, those that are INT8 in `params` in the dtype of `config`."""
    return {
        path: _widen(leaf, params[path + _SCALE], jnp.dtype(config.dtype)) if path + _SCALE in params else leaf
        for path, leaf in params.items()
        if not path.endswith(_SCALE)
    }


def quantize(path: str, weight: Array | np.ndarray) -> tuple[Array, Array]:
    """Quantizes the weight of a path; see `bass_jax.models.weights.quantize_weight`."""
    return _quantize(weight, NUM_CONTRACTED[_name(path)])


_quantize = jax.jit(quantize_weight, static_argnums=1)


@functools.partial(jax.jit, static_argnums=2)
def _widen(values: Array, scale: Array, dtype: np.dtype) -> Array:
    return (values * scale).astype(dtype)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
