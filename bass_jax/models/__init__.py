"""Decoders in Flax Linen behind one pure forward pass."""

from bass_jax.models.model import Model, abstract_params, forward, init_model, init_params
from bass_jax.models.presets import PRESETS, preset, random_model
from bass_jax.models.quantize import quantize_model
from bass_jax.models.sharding import place_model

__all__ = [
    "PRESETS",
    "Model",
    "abstract_params",
    "forward",
    "init_model",
    "init_params",
    "place_model",
    "preset",
    "quantize_model",
    "random_model",
]
