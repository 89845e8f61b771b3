"""Mixtral: Mistral with experts in every layer."""

import functools
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import experts, llama, tensor_names
from bass_jax.models.families.base import Family, Rule, read_integer
from bass_jax.models.families.windows import change_attention, read_window, write_window
from bass_jax.models.model_config import ModelConfig, MoEConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    }
    # Keys of other families; Mixtral's projections have no biases.
    source = {**defaults, **source, "attention_bias": False, "mlp_bias": False}
    config = llama.read_config(source, "mixtral")
    mlp = config.layers[0].mlp
    moe = MoEConfig(
        experts.read_num_experts(source, 8),
        read_integer(source, "num_experts_per_tok", 2),
        mlp.width,
        mlp.activation,
    )
    config = experts.change_mlps(config, lambda i: True, moe)
    return change_attention(config, [read_window(source)] * config.num_layers)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    moe = experts.find_moe(config)
    return llama.write_config(config, "MixtralForCausalLM") | {
        "intermediate_size": moe.width,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_active,
        "sliding_window": write_window(config),
    }


def _experts(config: MoEConfig, theirs: str) -> dict[str, Rule]:
    return tensor_names.experts(config, f"{theirs}.block_sparse_moe", ("w1", "w3", "w2"))


FAMILY = Family("mixtral", read_config, write_config, functools.partial(llama.rules, mlp=_experts))
