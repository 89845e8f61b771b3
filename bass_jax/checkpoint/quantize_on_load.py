"""Quantizes the weights of a checkpoint while they are read, one at a time."""

import functools
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from bass_jax.models import param_shapes
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.weights import NUM_CONTRACTED, dequantize_weight, is_quantized, quantize_weight

Builders = Mapping[str, Callable[[], np.ndarray]]
"""A function per path of our parameters that builds the array."""

_SCALE = "_scale"


def stored_dtype(config: ModelConfig, path: str, dtype: np.typing.DTypeLike) -> np.dtype:
    """Returns the dtype to read a tensor in: float32 if it is to be quantized, so that it is rounded once, or `dtype`.

    Args:
        config: of the model.
        path: of the parameter.
        dtype: of the parameter without quantization.
    """
    return np.dtype(np.float32) if is_quantized(config, _name(path)) else jnp.dtype(dtype)


def quantizing(builders: Builders, config: ModelConfig) -> Builders:
    """Returns builders of the parameters of `config`, some of which quantize what `builders` return.

    A weight is built once for its values and its scale if both are built one after the other.

    Args:
        builders: builders of the parameters of the model without quantization.
        config: of the model.
    """
    if config.quantize is None:
        return builders

    @functools.lru_cache(maxsize=1)
    def values_and_scale(path: str) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(part) for part in quantize_weight(builders[path](), NUM_CONTRACTED[_name(path)]))

    def builder(path: str) -> Callable:
        if path in builders and not is_quantized(config, _name(path)):
            return builders[path]
        weight = path.removesuffix(_SCALE)
        return lambda: values_and_scale(weight)[int(path != weight)]

    paths = param_shapes(config) | dict.fromkeys(builders)
    return {path: builder(path) for path in paths if path in builders or path.removesuffix(_SCALE) in builders}


def dequantizing(builders: Builders, dtype: np.dtype) -> Builders:
    """Returns builders of parameters without quantization from builders of INT8 weights and their scales."""

    def dequantize(path: str) -> np.ndarray:
        return dequantize_weight(builders[path](), builders[path + _SCALE]()).astype(dtype)

    return {
        path: functools.partial(dequantize, path) if path + _SCALE in builders else build
        for path, build in builders.items()
        if not path.endswith(_SCALE)
    }


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
