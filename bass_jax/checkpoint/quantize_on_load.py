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

    paths = flatten(abstract_params(config)) | dict.fromkeys(builders)
    return {path: builder(path) for path in paths if path in builders or path.removesuffix(_SCALE) in builders}


def widening(builders: dict[str, Callable[[], np.ndarray]], dtype: np.dtype) -> dict[str, Callable]:
    """Returns builders of parameters without quantization, which widen the INT8 weights that `builders` make."""

    def widen(path: str) -> np.ndarray:
        return (builders[path]() * builders[path + _SCALE]()).astype(dtype)

    return {
        path: functools.partial(widen, path) if path + _SCALE in builders else build
        for path, build in builders.items()
        if not path.endswith(_SCALE)
    }


def quantize(path: str, weight: Array | np.ndarray) -> tuple[Array, Array]:
    """Quantizes the weight of a path; see `bass_jax.models.weights.quantize_weight`."""
    return _quantize(weight, NUM_CONTRACTED[_name(path)])


_quantize = jax.jit(quantize_weight, static_argnums=1)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
