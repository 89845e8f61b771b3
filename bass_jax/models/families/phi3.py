"""Phi-3 and Phi-4: Llama with fused projections, and LongRoPE or partly rotated heads."""

import functools
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama, rope, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.families.windows import change_attention, read_window, write_window
from bass_jax.models.model_config import AttentionConfig, DenseMLP, ModelConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }
    # Keys of other families; Phi's projections have no biases.
    source = {**defaults, **source, "attention_bias": False, "mlp_bias": False}
    found = dict(rope.find_rope(source))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in ("su", "yarn"):  # As in `transformers`, old names of it.
        kind = "longrope"
    if kind not in ("default", "longrope"):
        raise ValueError(f"config.json: rope_type={kind!r}: expected 'default' or 'longrope'")
    others = {key: value for key, value in source.items() if key != "rope_scaling"}
    config = llama.read_config({**others, "rope_parameters": found | {"rope_type": kind}}, "phi3", rotary_share=1.0)
    return change_attention(config, [read_window(source)] * config.num_layers)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    written = llama.write_config(config, "Phi3ForCausalLM")
    original = written["rope_parameters"].get("original_max_position_embeddings", config.context)
    return written | {
        "sliding_window": write_window(config),
        "original_max_position_embeddings": original,
        "pad_token_id": None,  # The default of `transformers` may exceed the vocabulary.
    }


def attention_rules(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    """Returns the rules of an attention, without their path."""
    table = tensor_names.fused_qkv(config, f"{theirs}.qkv_proj", *tensor_names.stacked(config))
    return table | tensor_names.attention_out(config, f"{theirs}.o_proj", width)


def mlp_rules(config: DenseMLP, theirs: str) -> dict[str, Rule]:
    """Returns the rules of an MLP, without their path."""
    return tensor_names.fused_gate_up_mlp(config, f"{theirs}.mlp")


RULES = functools.partial(llama.rules, attention=attention_rules, mlp=mlp_rules)
FAMILY = Family("phi3", read_config, write_config, RULES)
