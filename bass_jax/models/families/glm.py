"""GLM-4: interleaved, partly rotated heads and a fused gate; in the models of 2025-04 with norms of the outputs too."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama, tensor_names
from bass_jax.models.families.base import Family, Rule
from bass_jax.models.families.phi3 import mlp_rules
from bass_jax.models.families.windows import change_attention
from bass_jax.models.model_config import AttentionConfig, ModelConfig

_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def read_glm(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    return _read(source, "glm")


def read_glm4(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    config = _read(source, "glm4")
    layers = tuple(dataclasses.replace(layer, block="sandwich") for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def _read(source: Mapping[str, Any], family: str) -> ModelConfig:
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    }
    config = llama.read_config({**defaults, **source, "mlp_bias": False}, family, rotary_share=0.5)
    return change_attention(config, [None] * config.num_layers, has_out_bias=False)


def write_glm(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return _write(config, "GlmForCausalLM")


def write_glm4(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return _write(config, "Glm4ForCausalLM")


def _write(config: ModelConfig, architecture: str) -> dict[str, Any]:
    written = llama.write_config(config, architecture)
    # Without it the default is one half.
    written["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return written | {"pad_token_id": None}  # The default of `transformers` may exceed the vocabulary.


def _attention(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    return tensor_names.interleaved(config, llama.attention_rules(config, theirs, width))


def _rules(config: ModelConfig, norms: Mapping[str, str]) -> dict[str, Rule]:
    return llama.rules(config, attention=_attention, mlp=mlp_rules, norms=norms)


GLM = Family("glm", read_glm, write_glm, functools.partial(_rules, norms=_NORMS))
GLM4 = Family(
    "glm4",
    read_glm4,
    write_glm4,
    functools.partial(
        _rules,
        norms=_NORMS | {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
    ),
)
