"""Mistral: Llama with a sliding window."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bass_jax.config import ModelConfig
from bass_jax.models.families import llama
from bass_jax.models.families.base import Family


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: as `llama.read_config`.
    """
    return dataclasses.replace(llama.read_config(source, "mistral"), window=source.get("sliding_window"))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    return llama.write_config(config, "MistralForCausalLM") | {"sliding_window": config.window}


FAMILY = Family("mistral", read_config, write_config, llama.rules)
