"""SmolLM3: Llama with some layers without rotary positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama
from bass_jax.models.families.base import Family, read_flag, read_integer
from bass_jax.models.families.rope import read_rotated_layers
from bass_jax.models.families.windows import (
    change_attention,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import ModelConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
    config = llama.read_config({**defaults, **source}, "smollm3", is_tied=True, rope_base=2e6)
    is_rotated = read_rotated_layers(source, config.num_layers)
    window = read_integer(source, "sliding_window", None, is_nullable=True)
    is_windowed = read_flag(source, "use_sliding_window", False) and window is not None
    windows = read_windows(source, window, [is_windowed and not rotated for rotated in is_rotated])
    layers = (
        layer if rotated else dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, rope=None))
        for layer, rotated in zip(change_attention(config, windows).layers, is_rotated, strict=True)
    )
    return dataclasses.replace(config, layers=tuple(layers))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    window = write_window(config)
    return llama.write_config(config, "SmolLM3ForCausalLM") | {
        "no_rope_layers": [int(layer.attention.rope is not None) for layer in config.layers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": write_layer_types(config),
        "pad_token_id": None,  # The default of `transformers` may exceed the vocabulary.
    }


FAMILY = Family("smollm3", read_config, write_config, llama.rules)
