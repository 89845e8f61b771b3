"""Quantizes a model that is in memory."""

import dataclasses
from typing import Any

import jax

from bass_jax.models.flax_model import Model
from bass_jax.models.weights import NUM_CONTRACTED, is_quantized, quantize_weight
from bass_jax.runtime.checks import check_choice, check_kind

_quantize = jax.jit(quantize_weight, static_argnums=1)


def quantize_model(model: Model, quantize: str = "int8", *, cache_dtype: str | None = None) -> Model:
    """Returns the model with its matrices in INT8; see `bass_jax.ModelConfig`.

    Args:
        model: without INT8 weights; its arrays are left alone.
        quantize: ``"int8"`` or ``"int8_activations"``.
        cache_dtype: ``"int8"`` for a cache of INT8; default the model's.

    Raises:
        ValueError: if `model` is quantized already.
    """
    check_kind("model", model, Model)
    check_choice("quantize", quantize, ("int8", "int8_activations"))
    check_choice("cache_dtype", cache_dtype, (None, "int8"))
    if model.config.quantize is not None:
        raise ValueError(f"model: expected one without INT8 weights, not quantize={model.config.quantize!r}")
    config = dataclasses.replace(model.config, quantize=quantize, cache_dtype=cache_dtype or model.config.cache_dtype)

    def visit(tree: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, leaf in tree.items():
            if isinstance(leaf, dict):
                found[name] = visit(leaf)
            elif is_quantized(config, name):
                found[name], found[f"{name}_scale"] = _quantize(leaf, NUM_CONTRACTED[name])
            else:
                found[name] = leaf
        return found

    return dataclasses.replace(model, params=visit(model.params), config=config)
