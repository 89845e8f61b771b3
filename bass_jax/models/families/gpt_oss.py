"""gpt-oss: attention sinks, windows in every other layer, and experts with biases, which files hold in MXFP4."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bass_jax.models.families import experts, llama, tensor_names
from bass_jax.models.families.base import Family, Rule, read_integer, read_number
from bass_jax.models.families.windows import (
    change_attention,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import AttentionConfig, ModelConfig, MoEConfig

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    }
    source = {**defaults, **source, "mlp_bias": False, "hidden_act": "silu"}  # The experts have one activation.
    if source.get("rope_parameters") is None and not source.get("rope_scaling"):
        source["rope_parameters"] = _ROPE
    config = llama.read_config(source, "gpt_oss", rope_base=150000.0)
    size = read_integer(source, "sliding_window", 128, is_nullable=False) if "sliding_window" in source else 128
    windows = read_windows(source, size, [i % 2 == 0 for i in range(config.num_layers)])
    moe = MoEConfig(
        experts.read_num_experts(source, 128),
        read_integer(source, "num_experts_per_tok", 4),
        config.layers[0].mlp.width,
        has_bias=True,
        gate_limit=read_number(source, "swiglu_limit", 7.0),
        gate_slope=read_number(source, "swiglu_alpha", 1.702),
    )
    return experts.change_mlps(change_attention(config, windows, has_sinks=True), lambda i: True, moe)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    moe = experts.find_moe(config)
    return llama.write_config(config, "GptOssForCausalLM") | {
        "intermediate_size": moe.width,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_active,
        "swiglu_limit": moe.gate_limit,
        "swiglu_alpha": moe.gate_slope,
        "sliding_window": write_window(config) or 128,
        "layer_types": write_layer_types(config),
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    return llama.rules(config, attention=_attention, mlp=_experts)


def _attention(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    shape = (config.num_kv_heads, config.queries_per_kv_head)
    sinks = Rule((f"{theirs}.sinks",), lambda x: x.reshape(shape), lambda x: (x.reshape(-1),))
    return llama.attention_rules(config, theirs, width) | {"sinks": sinks}


def _experts(config: MoEConfig, theirs: str) -> dict[str, Rule]:
    E, F, stored = config.num_experts, config.width, f"{theirs}.mlp.experts"

    def separate(x):  # Rows of the gate and of the other projection alternate.
        return x.reshape(E, F, 2, *x.shape[2:]).swapaxes(1, 2)

    def alternate(x):
        return x.swapaxes(1, 2).reshape(E, 2 * F, *x.shape[3:])

    def packed(name):
        return f"{stored}.{name}_blocks", f"{stored}.{name}_scales"

    def apart(kind):  # As in GGUF files.
        return Rule((f"{stored}.gate_proj.{kind}", f"{stored}.up_proj.{kind}"), lambda *x: np.stack(x, 1), lambda x: ())

    return {
        "router": tensor_names.same(f"{theirs}.mlp.router.weight"),
        "router_bias": tensor_names.same(f"{theirs}.mlp.router.bias"),
        "experts_gate_up": Rule(
            (f"{stored}.gate_up_proj",),
            lambda x: separate(x.swapaxes(1, 2)),
            lambda x: (alternate(x).swapaxes(1, 2),),
            Rule(
                packed("gate_up_proj"),
                lambda *x: separate(dequantize(*x)),
                lambda x: (),
                apart("weight"),
                is_packed=True,
            ),
        ),
        "experts_gate_up_bias": Rule(
            (f"{stored}.gate_up_proj_bias",), separate, lambda x: (alternate(x),), apart("bias")
        ),
        "experts_down": Rule(
            (f"{stored}.down_proj",),
            lambda x: x.swapaxes(1, 2),
            lambda x: (x.swapaxes(1, 2),),
            Rule(
                packed("down_proj"),
                dequantize,
                lambda x: (),
                tensor_names.same(f"{stored}.down_proj.weight"),
                is_packed=True,
            ),
        ),
        "experts_down_bias": tensor_names.same(f"{stored}.down_proj_bias"),
    }


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the values of MXFP4: 4-bit numbers, each 32 of which share a power of two.

    Args:
        blocks: ``[..., in / 32, 16]`` uint8, two numbers per byte, the first in the low bits.
        scales: ``[..., in / 32]`` uint8, exponents plus 127.

    Returns:
        ``[..., in]`` float32.
    """
    numbers = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
    return np.ldexp(numbers, scales[..., None].astype(np.int32) - 127).reshape(*scales.shape[:-1], -1)


FAMILY = Family("gpt_oss", read_config, write_config, rules)
