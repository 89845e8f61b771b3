"""Qwen2, Qwen2.5 and Qwen3: Llama with biases or norms on queries and keys, and windows in the upper layers."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama
from bass_jax.models.families.base import Family, read_flag, read_integer
from bass_jax.models.families.windows import (
    change_attention,
    read_window,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import ModelConfig


def read_qwen2(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
    # Keys of other families; the biases of Qwen2 are fixed.
    config = llama.read_config({**defaults, **source, "attention_bias": False, "mlp_bias": False}, "qwen2")
    return change_attention(config, _read_windows(config, source), has_bias=True, has_out_bias=False)


def read_qwen3(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768}
    config = llama.read_config({**defaults, **source, "mlp_bias": False}, "qwen3")
    return change_attention(config, _read_windows(config, source), qk_norm=config.final_norm)


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return llama.write_config(config, "Qwen2ForCausalLM") | _write_windows(config)


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return llama.write_config(config, "Qwen3ForCausalLM") | _write_windows(config)


def _read_windows(config: ModelConfig, source: Mapping[str, Any]) -> list[int | None]:
    first = read_integer(source, "max_window_layers", 28)
    window = read_window(source) if read_flag(source, "use_sliding_window", False) else None
    default = [window is not None and i >= first for i in range(config.num_layers)]
    return read_windows(source, window, default)


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    window = write_window(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.num_layers,
        "layer_types": write_layer_types(config),
    }


QWEN2 = Family("qwen2", read_qwen2, write_qwen2, llama.rules)
QWEN3 = Family("qwen3", read_qwen3, write_qwen3, llama.rules)
