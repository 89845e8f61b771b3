"""OLMo 2, OLMo 3 and OLMoE: a norm over all heads of the queries and of the keys.

OLMo 2 and 3 normalize the outputs of attention and MLP instead of their inputs; OLMo 3 has windows in most layers.
OLMoE has experts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import experts, llama, rope
from bass_jax.models.families.base import Family, read_integer, require_values
from bass_jax.models.families.windows import (
    change_attention,
    change_windowed_rope,
    read_window,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import ModelConfig, MoEConfig, RopeConfig


def read_olmo2(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    return _read(source, "olmo2")


def read_olmo3(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    full, local = rope.read_typed_ropes(source, 5e5)
    unused = ("rope_scaling", "original_max_position_embeddings")
    others = {key: value for key, value in source.items() if key not in unused}
    config = _read({**others, "rope_parameters": full}, "olmo3")
    windows = read_windows(source, read_window(source), [(i + 1) % 4 != 0 for i in range(config.num_layers)])
    config = change_attention(config, windows)
    # As in `transformers`, a base outside of the rope_parameters is that of the layers without a window.
    return change_windowed_rope(config, RopeConfig(rope.read_base(local, 5e5)))


def _read(source: Mapping[str, Any], family: str) -> ModelConfig:
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    config = llama.read_config({**defaults, **source, "mlp_bias": False}, family)
    config = _with_norms(config)
    layers = tuple(dataclasses.replace(layer, block="output_norm") for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def _with_norms(config: ModelConfig) -> ModelConfig:
    windows = [None] * config.num_layers
    return change_attention(config, windows, qk_norm=config.final_norm, qk_norm_span="all_heads")


def write_olmo2(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return llama.write_config(config, "Olmo2ForCausalLM")


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return llama.write_config(config, "Olmo3ForCausalLM") | {
        "rope_parameters": rope.write_typed_ropes(config, 5e5),
        "sliding_window": write_window(config),
        "layer_types": write_layer_types(config),
    }


def read_olmoe(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    require_values(source, clip_qkv=None, sliding_window=None)
    defaults = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    source = {**defaults, **source, "mlp_bias": False}
    config = llama.read_config(source, "olmoe")
    require_values(source, head_dim=config.width // config.layers[0].attention.num_heads)
    config = _with_norms(config)
    mlp = config.layers[0].mlp
    moe = MoEConfig(
        experts.read_num_experts(source, 64),
        read_integer(source, "num_experts_per_tok", 8),
        mlp.width,
        mlp.activation,
        is_normalized=experts.read_is_normalized(source),
    )
    return experts.change_mlps(config, lambda i: True, moe)


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    moe = experts.find_moe(config)
    return llama.write_config(config, "OlmoeForCausalLM") | {
        "intermediate_size": moe.width,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_active,
        "norm_topk_prob": moe.is_normalized,
    }


OLMO2 = Family("olmo2", read_olmo2, write_olmo2, llama.rules)
OLMO3 = Family("olmo3", read_olmo3, write_olmo3, llama.rules)
OLMOE = Family("olmoe", read_olmoe, write_olmoe, llama.rules)
