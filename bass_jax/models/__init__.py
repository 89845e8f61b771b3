"""Decoders in Flax Linen behind one pure forward pass."""

from bass_jax.models.model import Model, abstract_params, forward, init_model, init_params
from bass_jax.models.presets import PRESETS, preset, random_model

__all__ = [
    "PRESETS",
    "Model",
    "abstract_params",
    "forward",
    "init_model",
    "init_params",
    "preset",
    "random_model",
]
