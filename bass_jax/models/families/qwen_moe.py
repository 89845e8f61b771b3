"""Qwen2-MoE and Qwen3-MoE: experts in the layers of Qwen2 and Qwen3, in Qwen2-MoE with a gated shared MLP."""

from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import experts, llama
from bass_jax.models.families.base import Family, read_flag, read_integer
from bass_jax.models.families.windows import (
    change_attention,
    read_window,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import DenseMLP, ModelConfig, MoEConfig


def read_qwen2_moe(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {"num_key_value_heads": 16, "max_position_embeddings": 32768, "intermediate_size": 5632}
    # Keys of other families.
    source = {**defaults, **source, "attention_bias": False, "mlp_bias": False}
    config = llama.read_config(source, "qwen2_moe")
    last = read_integer(source, "max_window_layers", 28)
    window = _read_window(source)
    default = [window is not None and i % 2 == 0 and i < last for i in range(config.num_layers)]
    windows = read_windows(source, window, default)
    config = change_attention(config, windows, has_bias=read_flag(source, "qkv_bias", True), has_out_bias=False)
    shared = DenseMLP(read_integer(source, "shared_expert_intermediate_size", 5632), config.layers[0].mlp.activation)
    return with_experts(config, source, {"experts": 60, "active": 4, "width": 1408}, shared)


def read_qwen3_moe(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "intermediate_size": 6144}
    config = llama.read_config({**defaults, **source, "mlp_bias": False}, "qwen3_moe")
    windows = [_read_window(source)] * config.num_layers
    config = change_attention(config, windows, qk_norm=config.final_norm)
    return with_experts(config, source, {"experts": 128, "active": 8, "width": 768}, None)


def _read_window(source: Mapping[str, Any]) -> int | None:
    return read_window(source) if read_flag(source, "use_sliding_window", False) else None


def with_experts(
    config: ModelConfig, source: Mapping[str, Any], defaults: Mapping[str, int], shared: DenseMLP | None
) -> ModelConfig:
    """Returns `config` with the experts of `source` in the layers that have some.

    Args:
        config: of a model without experts.
        source: the Hugging Face configuration.
        defaults: number of experts and of active ones, and the width of each.
        shared: the shared MLP, whose output has a gate; None for none.
    """
    if (num_experts := experts.read_num_experts(source, defaults["experts"])) <= 0:
        return config
    moe = MoEConfig(
        num_experts,
        read_integer(source, "num_experts_per_tok", defaults["active"]),
        read_integer(source, "moe_intermediate_size", defaults["width"]),
        config.layers[0].mlp.activation,
        is_normalized=experts.read_is_normalized(source),
        shared=shared,
        has_shared_gate=shared is not None,
    )
    return experts.change_mlps(config, experts.read_sparse_layers(source), moe)


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    shared = experts.find_moe(config).shared
    assert shared is not None
    return _write(config, "Qwen2MoeForCausalLM") | {
        "shared_expert_intermediate_size": shared.width,
        "qkv_bias": config.layers[0].attention.has_bias,
        "layer_types": write_layer_types(config),
    }


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return _write(config, "Qwen3MoeForCausalLM")


def _write(config: ModelConfig, architecture: str) -> dict[str, Any]:
    moe, window = experts.find_moe(config), write_window(config)
    sizes = {"intermediate_size": moe.width, **llama.write_config(config, architecture)}
    return (
        sizes
        | experts.write_sparse_layers(config)
        | {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "moe_intermediate_size": moe.width,
            "norm_topk_prob": moe.is_normalized,
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }
    )


QWEN2_MOE = Family("qwen2_moe", read_qwen2_moe, write_qwen2_moe, llama.rules)
QWEN3_MOE = Family("qwen3_moe", read_qwen3_moe, write_qwen3_moe, llama.rules)
