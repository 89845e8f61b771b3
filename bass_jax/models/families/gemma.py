"""Gemma, Gemma 2, Gemma 3's text models: scaled embeddings, offset norms, norms around both parts, windows, caps."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bass_jax.config import ModelConfig
from bass_jax.models.families import llama
from bass_jax.models.families.base import WRITTEN_ACTIVATIONS, Family, read_activation, read_integer, refuse
from bass_jax.models.families.qwen import read_layer_types, write_layer_types


def read_gemma(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    refuse(source, use_bidirectional_attention=None)
    return _common(source, "gemma", "hidden_activation" if source.get("hidden_activation") else "hidden_act")


def read_gemma2(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    _refuse_bidirectional(source)
    config = _common(source, "gemma2", "hidden_activation")
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.num_layers)]
    return dataclasses.replace(
        _with_windows(config, source, default),
        attention_softcap=source.get("attn_logit_softcapping", 50.0),
        logit_softcap=source.get("final_logit_softcapping", 30.0),
    )


def read_gemma3(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    refuse(source, attn_logit_softcapping=None)
    _refuse_bidirectional(source)
    rope = source.get("rope_parameters") or {}
    everywhere = {"rope_theta": source.get("rope_theta", 1e6), **(source.get("rope_scaling") or {})}
    everywhere |= rope.get("full_attention") or {}
    local = rope.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_parameters: sliding_attention: rope_type={local['rope_type']!r}: "
                         "expected 'default'")  # fmt: skip
    config = _common({**source, "rope_parameters": everywhere}, "gemma3_text", "hidden_activation")
    pattern = read_integer(source, "sliding_window_pattern", 6)
    default = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(config.num_layers)]
    return dataclasses.replace(
        _with_windows(config, source, default),
        has_qk_norm=True,
        window_rope_base=float(local.get("rope_theta", source.get("rope_local_base_freq", 10000.0))),
        logit_softcap=source.get("final_logit_softcapping"),
    )


def _refuse_bidirectional(source: Mapping[str, Any]) -> None:
    if source.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention=True: expected false")


def _with_windows(config: ModelConfig, source: Mapping[str, Any], default: list[str]) -> ModelConfig:
    """What Gemma 2 and 3 share: norms around both parts, a scale and a window of their own."""
    return dataclasses.replace(
        config,
        block="sandwich",
        attention_scale=float(source.get("query_pre_attn_scalar", 256)) ** -0.5,
        window=read_integer(source, "sliding_window", 4096),
        windowed_layers=read_layer_types(source, default),
    )


def _common(source: Mapping[str, Any], family: str, activation: str) -> ModelConfig:
    # The activation has a key of its own here; "hidden_act" may say what is not done.
    config = llama.read_config({"head_dim": 256, **source, "hidden_act": None}, family, is_tied=True)
    return dataclasses.replace(
        config,
        norm_offset=1.0,
        embedding_scale=float(config.width) ** 0.5,
        activation=read_activation(source, activation, "gelu_pytorch_tanh"),
    )


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    activation = WRITTEN_ACTIVATIONS[config.activation]
    return llama.write_config(config, "GemmaForCausalLM") | {"hidden_activation": activation}


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    caps = {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.logit_softcap}
    return llama.write_config(config, "Gemma2ForCausalLM") | _write_windows(config) | caps


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    return (
        llama.write_config(config, "Gemma3ForCausalLM")
        | _write_windows(config)
        | {
            "final_logit_softcapping": config.logit_softcap,
            "rope_parameters": {
                "full_attention": llama.write_rope(config),
                "sliding_attention": {"rope_type": "default", "rope_theta": config.window_rope_base},
            },
        }
    )


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    assert config.attention_scale is not None
    scalar = round(config.attention_scale**-2, 6)
    return {
        "hidden_activation": WRITTEN_ACTIVATIONS[config.activation],
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,  # Theirs is typed as an integer.
        "sliding_window": config.window,
        "layer_types": write_layer_types(config),
    }


GEMMA = Family("gemma", read_gemma, write_gemma, llama.rules)
GEMMA2 = Family("gemma2", read_gemma2, write_gemma2, llama.rules)
GEMMA3 = Family("gemma3_text", read_gemma3, write_gemma3, llama.rules)
