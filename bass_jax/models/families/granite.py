"""Granite: Llama with factors on the embedding, the scores, the residual additions and the logits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama
from bass_jax.models.families.base import Family, read_number
from bass_jax.models.families.windows import change_attention
from bass_jax.models.model_config import ModelConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    config = llama.read_config(source, "granite")
    embedding, scores, residual, logits = (
        read_number(source, key, 1.0)
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    if logits == 0:
        raise ValueError("config.json: logits_scaling=0: expected another number")
    config = change_attention(config, [None] * config.num_layers, scale=scores)
    layers = tuple(dataclasses.replace(layer, residual_scale=residual) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, embedding_scale=embedding, logit_scale=1.0 / logits)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    layer = config.layers[0]
    return llama.write_config(config, "GraniteForCausalLM") | {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": layer.attention.scale,
        "residual_multiplier": layer.residual_scale,
        "logits_scaling": 1.0 / config.logit_scale,
    }


FAMILY = Family("granite", read_config, write_config, llama.rules)
