"""Models: the Flax decoder, its configuration and cache, model families, quantization, sharding.

Imports `bass_jax.runtime` and `kernels_pallas`. Start with `model_config.py`, then `decoder.py`, then `flax_model.py`,
the pure forward pass over both.
"""

from bass_jax.models.flax_model import Model, abstract_params, forward, init_model, init_params
from bass_jax.models.model_config import (
    AttentionConfig,
    DenseMLP,
    LayerConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    RopeScaling,
)
from bass_jax.models.presets import PRESETS, preset, random_model
from bass_jax.models.quantize_model import quantize_model
from bass_jax.models.sharding import place_model

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "DenseMLP",
    "LayerConfig",
    "Model",
    "ModelConfig",
    "NormConfig",
    "RopeConfig",
    "RopeScaling",
    "abstract_params",
    "forward",
    "init_model",
    "init_params",
    "place_model",
    "preset",
    "quantize_model",
    "random_model",
]
