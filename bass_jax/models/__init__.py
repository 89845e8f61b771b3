"""Models: the Flax decoder, its configuration and its cache, model families, quantization and sharding.

Imports `bass_jax.runtime` and `kernels_pallas`. Start with `model_config.py`, then `decoder.py`, then `flax_model.py`.
`protocol.py` is what the rest of the package knows of a model; `adapters` makes other libraries' models follow it.
"""

from bass_jax.models.decoder import ForwardOutput
from bass_jax.models.flax_model import Model, abstract_params, init_model, init_params, param_shapes, require_model
from bass_jax.models.mesh import start_distributed, tensor_parallel_mesh
from bass_jax.models.model_config import (
    AttentionConfig,
    DenseMLP,
    GatedDeltaConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    RopeConfig,
    RopeScaling,
)
from bass_jax.models.presets import PRESETS, preset, random_model
from bass_jax.models.protocol import TargetModel
from bass_jax.models.quantize_model import quantize_model
from bass_jax.models.sharding import place_model

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "DenseMLP",
    "ForwardOutput",
    "GatedDeltaConfig",
    "LatentConfig",
    "LayerConfig",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "NormConfig",
    "RopeConfig",
    "RopeScaling",
    "TargetModel",
    "abstract_params",
    "init_model",
    "init_params",
    "param_shapes",
    "place_model",
    "preset",
    "quantize_model",
    "random_model",
    "require_model",
    "start_distributed",
    "tensor_parallel_mesh",
]
