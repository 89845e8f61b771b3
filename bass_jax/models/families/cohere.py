"""Command R and Command R7B: parallel blocks, layer norms without biases, interleaved rotated lanes, scaled logits.

In Command R7B, layers without a window have no rotary positions.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama, tensor_names
from bass_jax.models.families.base import Family, Rule, read_flag, read_integer, read_number
from bass_jax.models.families.windows import (
    change_attention,
    read_window,
    read_windows,
    write_layer_types,
    write_window,
)
from bass_jax.models.model_config import AttentionConfig, ModelConfig, NormConfig


def read_cohere(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    config = _read(source, "cohere", 5e5)
    if not read_flag(source, "use_qk_norm", False):
        return config
    windows = [None] * config.num_layers
    return change_attention(config, windows, qk_norm=config.final_norm, qk_norm_span="each_head")


def read_cohere2(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    # `transformers` computes the size of the heads.
    source = {key: value for key, value in source.items() if key != "head_dim"}
    config = _read(source, "cohere2", 1e4)
    pattern = read_integer(source, "sliding_window_pattern", 4)
    if pattern == 0:
        raise ValueError("config.json: sliding_window_pattern=0: expected another integer")
    windows = read_windows(source, read_window(source), [(i + 1) % pattern != 0 for i in range(config.num_layers)])
    layers = (
        layer
        if layer.attention.window is not None
        else dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, rope=None))
        for layer in change_attention(config, windows).layers
    )
    return dataclasses.replace(config, layers=tuple(layers))


def _read(source: Mapping[str, Any], family: str, rope_base: float) -> ModelConfig:
    defaults = {"max_position_embeddings": 8192}
    others = {key: value for key, value in source.items() if key != "rms_norm_eps"}
    config = llama.read_config({**defaults, **others, "mlp_bias": False}, family, is_tied=True, rope_base=rope_base)
    norm = NormConfig("layer", read_number(source, "layer_norm_eps", 1e-5), has_bias=False)
    layers = tuple(dataclasses.replace(layer, norm=norm, block="parallel") for layer in config.layers)
    scale = read_number(source, "logit_scale", 0.0625)
    return dataclasses.replace(config, layers=layers, final_norm=norm, logit_scale=scale)


def write_cohere(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return _write(config, "CohereForCausalLM") | {"use_qk_norm": config.layers[0].attention.qk_norm is not None}


def write_cohere2(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return _write(config, "Cohere2ForCausalLM") | {
        "sliding_window": write_window(config),
        "layer_types": write_layer_types(config),
    }


def _write(config: ModelConfig, architecture: str) -> dict[str, Any]:
    written = llama.write_config(config, architecture)
    unused = ("mlp_bias", "rms_norm_eps")
    return {key: value for key, value in written.items() if key not in unused} | {
        "layer_norm_eps": config.layers[0].norm.eps,
        "logit_scale": config.logit_scale,
    }


def _attention(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    table = llama.attention_rules(config, theirs, width)
    if config.qk_norm is not None:
        K, R, H = config.num_kv_heads, config.queries_per_kv_head, config.head_dim
        for name, their_name, heads in (("query_norm", "q_norm", R), ("key_norm", "k_norm", 1)):
            table[name] = Rule(
                (f"{theirs}.{their_name}.weight",),
                lambda x, heads=heads: x.reshape(K, heads, H),
                lambda x, heads=heads: (x.reshape(K * heads, H),),
            )
    return tensor_names.interleaved(config, table)


_RULES = functools.partial(llama.rules, attention=_attention)
COHERE = Family("cohere", read_cohere, write_cohere, _RULES)
COHERE2 = Family("cohere2", read_cohere2, write_cohere2, _RULES)
