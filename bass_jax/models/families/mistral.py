"""Mistral: Llama with a sliding window; in Ministral only some layers have it."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama
from bass_jax.models.families.base import Family
from bass_jax.models.families.windows import (
    change_attention,
    read_window,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import ModelConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    # `transformers` reads a Mistral configuration with layer types as one of Ministral.
    family = "ministral" if "layer_types" in source else source["model_type"]
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
    # Keys of other families; Mistral's projections have no biases.
    config = llama.read_config({**defaults, **source, "attention_bias": False, "mlp_bias": False}, family)
    window = read_window(source)
    return change_attention(config, read_windows(source, window, [window is not None] * config.num_layers))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    name = "MinistralForCausalLM" if config.family == "ministral" else "MistralForCausalLM"
    types = {"layer_types": write_layer_types(config)} if config.family == "ministral" else {}
    return llama.write_config(config, name) | {"sliding_window": write_window(config)} | types


MISTRAL = Family("mistral", read_config, write_config, llama.rules)
MINISTRAL = Family("ministral", read_config, write_config, llama.rules)
