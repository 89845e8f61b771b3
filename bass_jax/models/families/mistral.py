"""Mistral: Llama with a sliding window; Ministral has it in some layers only."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama
from bass_jax.models.families.base import Family, read_integer
from bass_jax.models.families.windows import change_attention, read_windows, write_layer_types, write_window
from bass_jax.models.model_config import ModelConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one; with ``layer_types`` `transformers` reads it as Ministral's.

    Raises:
        ValueError: as `llama.read_config`.
    """
    family = "ministral" if "layer_types" in source else source["model_type"]
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
    # Biases are keys of other families; these projections have none.
    config = llama.read_config({**defaults, **source, "attention_bias": False, "mlp_bias": False}, family)
    window = read_integer(source, "sliding_window", 4096) if source.get("sliding_window", 4096) is not None else None
    return change_attention(config, read_windows(source, window, [window is not None] * config.num_layers))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    name = "MinistralForCausalLM" if config.family == "ministral" else "MistralForCausalLM"
    types = {"layer_types": write_layer_types(config)} if config.family == "ministral" else {}
    return llama.write_config(config, name) | {"sliding_window": write_window(config)} | types


MISTRAL = Family("mistral", read_config, write_config, llama.rules)
MINISTRAL = Family("ministral", read_config, write_config, llama.rules)
