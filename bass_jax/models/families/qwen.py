"""Qwen2, Qwen2.5 and Qwen3: Llama with biases or norms on queries and keys, and windows in the upper layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bass_jax.config import ModelConfig
from bass_jax.models.families import llama
from bass_jax.models.families.base import Family, read_integer


def read_qwen2(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: as `llama.read_config`.
    """
    config = llama.read_config(source, "qwen2")
    config = dataclasses.replace(config, has_attention_bias=True, has_out_bias=False)
    return _with_windows(config, source)


def read_qwen3(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: as `llama.read_config`.
    """
    config = llama.read_config({"head_dim": 128, **source}, "qwen3")
    return _with_windows(dataclasses.replace(config, has_qk_norm=True), source)


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    return llama.write_config(config, "Qwen2ForCausalLM") | _write_windows(config)


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    return llama.write_config(config, "Qwen3ForCausalLM") | _write_windows(config)


def _with_windows(config: ModelConfig, source: Mapping[str, Any]) -> ModelConfig:
    if not source.get("use_sliding_window", False) or source.get("sliding_window") is None:
        return config
    first = read_integer(source, "max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(config.num_layers)]
    windowed = read_layer_types(source, default)
    return dataclasses.replace(config, window=source["sliding_window"], windowed_layers=windowed)


def read_layer_types(source: Mapping[str, Any], default: list[str]) -> tuple[bool, ...]:
    """Reads which layers have the window.

    Raises:
        ValueError: if a layer is of another type.
    """
    types = source.get("layer_types") or default
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(f"config.json: layer_types: {kind!r}: expected 'sliding_attention' or 'full_attention'")
    return tuple(kind == "sliding_attention" for kind in types)


def write_layer_types(config: ModelConfig) -> list[str]:
    """Makes ``layer_types``."""
    windows = (config.window_of(i) for i in range(config.num_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": config.num_layers,
        "layer_types": write_layer_types(config),
    }


QWEN2 = Family("qwen2", read_qwen2, write_qwen2, llama.rules)
QWEN3 = Family("qwen3", read_qwen3, write_qwen3, llama.rules)
