"""Quantizes a model that is in memory."""

import dataclasses

from flax.traverse_util import flatten_dict, unflatten_dict

from bass_jax.models.flax_model import Model
from bass_jax.models.weights import NUM_CONTRACTED, is_quantized, quantize_weight
from bass_jax.runtime.checks import check_choice, check_kind


def quantize_model(model: Model, quantize: str = "int8", *, cache_dtype: str | None = None) -> Model:
    """Returns the model with its matrices in INT8; see `bass_jax.models.ModelConfig`.

    Args:
        model: a model without INT8 weights; its arrays are not changed.
        quantize: ``"int8"`` or ``"int8_activations"``.
        cache_dtype: ``"int8"`` for an INT8 cache; by default the model's.

    Raises:
        ValueError: if `model` has INT8 weights.
    """
    check_kind("model", model, Model)
    check_choice("quantize", quantize, ("int8", "int8_activations"))
    check_choice("cache_dtype", cache_dtype, (None, "int8"))
    if model.config.quantize is not None:
        raise ValueError(f"model: expected one without INT8 weights, not quantize={model.config.quantize!r}")
    config = dataclasses.replace(model.config, quantize=quantize, cache_dtype=cache_dtype or model.config.cache_dtype)
    params = {}
    for path, leaf in flatten_dict(model.params, sep="/").items():
        name = path.rsplit("/", 1)[-1]
        if is_quantized(config, name):
            params[path], params[f"{path}_scale"] = quantize_weight(leaf, NUM_CONTRACTED[name])
        else:
            params[path] = leaf
    return dataclasses.replace(model, params=unflatten_dict(params, sep="/"), config=config)
