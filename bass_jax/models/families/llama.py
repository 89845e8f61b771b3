"""Llama 2 and 3, SmolLM2, TinyLlama and every model of their layout."""

import math
from collections.abc import Mapping
from typing import Any

from bass_jax.config import ModelConfig, RopeScaling
from bass_jax.models.families import layouts
from bass_jax.models.families.base import WRITTEN_ACTIVATIONS, Family, Rule, read_activation, read_integer


def read_config(source: Mapping[str, Any], family: str = "llama", *, is_tied: bool = False) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Args:
        source: the Hugging Face configuration.
        family: to name in ours; families of this layout start from here.
        is_tied: where the source does not say.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    width, num_heads = read_integer(source, "hidden_size"), read_integer(source, "num_attention_heads")
    rope = dict(source.get("rope_parameters") or {})
    scaling = dict(source.get("rope_scaling") or {})
    return ModelConfig(
        family=family,
        vocab_size=read_integer(source, "vocab_size"),
        width=width,
        num_layers=read_integer(source, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read_integer(source, "num_key_value_heads", num_heads),
        head_dim=read_integer(source, "head_dim", width // max(num_heads, 1)),
        mlp_width=read_integer(source, "intermediate_size"),
        context=read_integer(source, "max_position_embeddings", 2048),
        rope_base=float(rope.get("rope_theta", source.get("rope_theta", 10000.0))),
        rope_scaling=read_scaling(rope or scaling, source.get("max_position_embeddings")),
        norm_eps=float(source.get("rms_norm_eps", 1e-6)),
        is_tied=bool(source.get("tie_word_embeddings", is_tied)),
        has_attention_bias=bool(source.get("attention_bias", False)),
        has_mlp_bias=bool(source.get("mlp_bias", False)),
        activation=read_activation(source, "hidden_act", "silu"),
    )


def read_scaling(source: Mapping[str, Any], context: int | None = None) -> RopeScaling | None:
    """Reads ``rope_parameters`` or the older ``rope_scaling``.

    Args:
        source: the one or the other.
        context: of the first training where neither says.

    Raises:
        ValueError: if it is of an unknown type.
    """
    kind = source.get("rope_type", source.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(source["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(source["factor"]),
            float(source["low_freq_factor"]),
            float(source["high_freq_factor"]),
            int(source["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        return _read_yarn({"original_max_position_embeddings": context, **source})
    raise ValueError(f"config.json: rope_type={kind!r}: expected 'default', 'linear', 'llama3' or 'yarn'")


def _read_yarn(source: Mapping[str, Any]) -> RopeScaling:
    factor = float(source["factor"])
    attention_factor = source.get("attention_factor")
    own, of_all = source.get("mscale"), source.get("mscale_all_dim")
    if attention_factor is None and own and of_all:  # DeepSeek's way of saying it.
        attention_factor = (0.1 * own * math.log(factor) + 1) / (0.1 * of_all * math.log(factor) + 1)
    return RopeScaling(
        "yarn",
        factor,
        original_context=int(source["original_max_position_embeddings"]),
        beta_fast=float(source.get("beta_fast") or 32),
        beta_slow=float(source.get("beta_slow") or 1),
        attention_factor=None if attention_factor is None else float(attention_factor),
        is_truncated=bool(source.get("truncate", True)),
    )


def write_config(config: ModelConfig, architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "hidden_act": WRITTEN_ACTIVATIONS[config.activation],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.context,
        "rope_parameters": write_rope(config),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_attention_bias,
        "mlp_bias": config.has_mlp_bias,
    }


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Makes ``rope_parameters``."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
        if scaling.kind == "yarn":
            rope |= {
                "original_max_position_embeddings": scaling.original_context,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "attention_factor": scaling.attention_factor,
                "truncate": scaling.is_truncated,
            }
    return rope


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Says where each of our tensors comes from."""
    table = {
        "embedding": layouts.transposed("model.embed_tokens.weight"),
        "final_norm": layouts.same("model.norm.weight"),
    }
    if not config.is_tied:
        table["head"] = layouts.transposed("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"layer_{i}", f"model.layers.{i}"
        table |= layouts.under(f"{ours}/attention", _attention(config, f"{theirs}.self_attn"))
        table |= layouts.under(f"{ours}/mlp", layouts.gated_mlp(config, f"{theirs}.mlp"))
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if config.block == "sandwich":
            norms |= {
                "attention_post_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_post_norm": "post_feedforward_layernorm",
            }
        table |= {f"{ours}/{name}": layouts.same(f"{theirs}.{their_name}.weight") for name, their_name in norms.items()}
    return table


def _attention(config: ModelConfig, theirs: str) -> dict[str, Rule]:
    q, k, v = (f"{theirs}.{name}_proj" for name in "qkv")
    table = {"qkv": layouts.qkv(config, (q, k, v), "weight")}
    if config.has_attention_bias:
        table["qkv_bias"] = layouts.qkv(config, (q, k, v), "bias")
    if config.has_qk_norm:
        table |= {
            "query_norm": layouts.same(f"{theirs}.q_norm.weight"),
            "key_norm": layouts.same(f"{theirs}.k_norm.weight"),
        }
    return table | layouts.attention_out(config, f"{theirs}.o_proj")


FAMILY = Family("llama", read_config, write_config, rules)
