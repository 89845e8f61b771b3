"""Decoders in Flax Linen behind one pure forward pass."""

from bass_jax.models.model import Model, abstract_params, forward, init_model, init_params

__all__ = ["Model", "abstract_params", "forward", "init_model", "init_params"]
