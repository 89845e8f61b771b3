"""Gemma, Gemma 2 and the text models of Gemma 3: scaled embeddings, norms with an offset, windows and caps."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import base, llama, rope
from bass_jax.models.families.base import (
    WRITTEN_ACTIVATIONS,
    Family,
    read_integer,
    read_number,
    read_text_part,
    require_values,
)
from bass_jax.models.families.windows import (
    change_attention,
    change_windowed_rope,
    read_window,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import ModelConfig, RopeConfig


def read_gemma(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    if source.get("hidden_act") == "gelu":  # The first checkpoints use this name for it.
        source = {**source, "hidden_act": "gelu_pytorch_tanh"}
    return _common(source, "gemma", "hidden_act", num_kv_heads=16)


def read_gemma2(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    config = _common(source, "gemma2", "hidden_activation", num_kv_heads=4)
    config = change_attention(
        config,
        _read_windows(source, [i % 2 == 0 for i in range(config.num_layers)]),
        scale=_read_scale(source),
        softcap=_read_softcap(source, "attn_logit_softcapping", 50.0),
    )
    return _sandwich(config, _read_softcap(source, "final_logit_softcapping", 30.0))


def read_gemma3(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    require_values(source, attn_logit_softcapping=None)
    full, local = rope.read_typed_ropes(source, 1e6)
    others = {
        key: value for key, value in source.items() if key not in ("rope_scaling", "original_max_position_embeddings")
    }
    config = _common({**others, "rope_parameters": full}, "gemma3_text", "hidden_activation", num_kv_heads=4)
    pattern = read_integer(source, "sliding_window_pattern", 6)
    if pattern < 1:
        raise ValueError(f"config.json: sliding_window_pattern={pattern}: expected a positive integer")
    windows = _read_windows(source, [(i + 1) % pattern != 0 for i in range(config.num_layers)])
    config = change_attention(config, windows, scale=_read_scale(source), qk_norm=config.final_norm)
    windowed_rope = RopeConfig(rope.read_base(local, read_number(source, "rope_local_base_freq", 10000.0)))
    config = change_windowed_rope(config, windowed_rope)
    return _sandwich(config, _read_softcap(source, "final_logit_softcapping", None))


def read_gemma3_text_part(source: Mapping[str, Any]) -> ModelConfig:
    """Reads the configuration of a Gemma 3 with a vision tower; its text model is that of ``gemma3_text``."""
    text = read_text_part(source, "gemma3_text", is_tied=True)
    defaults = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    }
    return read_gemma3({**defaults, **text})


def canonical(name: str) -> str | None:
    """Ignores the vision tower, and removes the names of the text part; see `Family.canonical`."""
    name = name.removeprefix("model.") if name.startswith(("model.language_model.", *_VISION_IN_MODEL)) else name
    if name.startswith(_VISION):
        return None
    if name.startswith("language_model.") and not name.startswith(("language_model.model.", "language_model.lm_head.")):
        return "model." + name.removeprefix("language_model.")
    return base.canonical(name.removeprefix("language_model."))


_VISION = ("vision_tower.", "multi_modal_projector.")
_VISION_IN_MODEL = tuple(f"model.{name}" for name in _VISION)


def _read_softcap(source: Mapping[str, Any], key: str, default: float | None) -> float | None:
    return None if source.get(key, default) is None else read_number(source, key, default)


def _read_scale(source: Mapping[str, Any]) -> float:
    scalar = read_number(source, "query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise ValueError(f"config.json: query_pre_attn_scalar={scalar}: expected a positive number")
    return scalar**-0.5


def _read_windows(source: Mapping[str, Any], default: list[bool]) -> list[int | None]:
    return read_windows(source, read_window(source), default)


def _sandwich(config: ModelConfig, logit_softcap: float | None) -> ModelConfig:
    layers = tuple(dataclasses.replace(layer, block="sandwich") for layer in config.layers)
    return dataclasses.replace(config, layers=layers, logit_softcap=logit_softcap)


def _common(source: Mapping[str, Any], family: str, activation: str, num_kv_heads: int) -> ModelConfig:
    if source.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention=True: expected false")
    defaults = {
        "head_dim": 256,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 131072 if family == "gemma3_text" else 8192,
        activation: "gelu_pytorch_tanh",
    }
    config = llama.read_config({**defaults, **source, "mlp_bias": False}, family, is_tied=True, activation=activation)
    norm = dataclasses.replace(config.layers[0].norm, offset=1.0)
    layers = (dataclasses.replace(config.layers[0], norm=norm),) * config.num_layers
    return dataclasses.replace(config, layers=layers, final_norm=norm, embedding_scale=float(config.width) ** 0.5)


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    activation = WRITTEN_ACTIVATIONS[config.layers[0].mlp.activation]
    return llama.write_config(config, "GemmaForCausalLM") | {"hidden_act": activation}


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    caps = {
        "attn_logit_softcapping": config.layers[0].attention.softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
    return llama.write_config(config, "Gemma2ForCausalLM") | _write_windows(config) | caps


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return (
        llama.write_config(config, "Gemma3ForCausalLM")
        | _write_windows(config)
        | {
            "final_logit_softcapping": config.logit_softcap,
            "rope_parameters": rope.write_typed_ropes(config, 1e6),
        }
    )


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    assert layer.attention.scale is not None
    scalar = round(layer.attention.scale**-2, 6)
    return {
        "hidden_activation": WRITTEN_ACTIVATIONS[layer.mlp.activation],
        # `transformers` declares it as an integer.
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "sliding_window": write_window(config),
        "layer_types": write_layer_types(config),
    }


GEMMA = Family("gemma", read_gemma, write_gemma, llama.rules)
GEMMA2 = Family("gemma2", read_gemma2, write_gemma2, llama.rules)
GEMMA3 = Family("gemma3_text", read_gemma3, write_gemma3, llama.rules, canonical)
GEMMA3_TEXT_PART = Family("gemma3", read_gemma3_text_part, write_gemma3, llama.rules, canonical)
