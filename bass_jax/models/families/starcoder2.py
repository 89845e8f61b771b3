"""StarCoder2: layer norms, biases, an MLP without a gate, and a window."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families import llama, tensor_names
from bass_jax.models.families.base import WRITTEN_ACTIVATIONS, Family, Rule, read_flag, read_number
from bass_jax.models.families.windows import change_attention, read_window, write_window
from bass_jax.models.model_config import DenseMLP, ModelConfig, NormConfig


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
    }
    has_bias = read_flag(source, "use_bias", True)
    source = {**defaults, **source, "attention_bias": has_bias, "mlp_bias": has_bias}
    norm = NormConfig("layer", read_number(source, "norm_epsilon", 1e-5))
    others = {key: value for key, value in source.items() if key != "rms_norm_eps"}
    config = llama.read_config(others, "starcoder2", is_tied=True)
    config = change_attention(config, [read_window(source)] * config.num_layers)
    layers = (
        dataclasses.replace(layer, norm=norm, mlp=dataclasses.replace(layer.mlp, is_gated=False))
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=tuple(layers), final_norm=norm)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    layer = config.layers[0]
    written = llama.write_config(config, "Starcoder2ForCausalLM")
    unused = ("attention_bias", "mlp_bias", "rms_norm_eps")
    return {key: value for key, value in written.items() if key not in unused} | {
        "norm_epsilon": layer.norm.eps,
        "hidden_act": WRITTEN_ACTIVATIONS[layer.mlp.activation],
        "use_bias": layer.attention.has_bias,
        "sliding_window": write_window(config),
    }


def _mlp(config: DenseMLP, theirs: str) -> dict[str, Rule]:
    return tensor_names.plain_mlp(config, f"{theirs}.mlp.c_fc", f"{theirs}.mlp.c_proj")


FAMILY = Family("starcoder2", read_config, write_config, functools.partial(llama.rules, mlp=_mlp))
