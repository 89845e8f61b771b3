"""Llama 2 and 3, SmolLM2, TinyLlama and every model of their layout."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bass_jax.config import ModelConfig, RopeScaling
from bass_jax.models.families.base import Family, Rule


def read_config(source: Mapping[str, Any]) -> ModelConfig:
    """Makes our configuration from a Hugging Face one.

    Raises:
        ValueError: if a key is missing or asks for what this decoder does not do.
    """
    required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for key in required:
        if not isinstance(source.get(key), int):
            raise ValueError(f"config.json: {key}={source.get(key)!r}: expected an integer")
    activation = source.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act={activation!r}: expected 'silu' for the llama family")
    num_heads = source["num_attention_heads"]
    rope = dict(source.get("rope_parameters") or {})
    scaling = dict(source.get("rope_scaling") or {})
    rope_base = rope.get("rope_theta", source.get("rope_theta", 10000.0))
    return ModelConfig(
        family="llama",
        vocab_size=source["vocab_size"],
        width=source["hidden_size"],
        num_layers=source["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=source.get("num_key_value_heads") or num_heads,
        head_dim=source.get("head_dim") or source["hidden_size"] // num_heads,
        mlp_width=source["intermediate_size"],
        context=source.get("max_position_embeddings", 2048),
        rope_base=float(rope_base),
        rope_scaling=_read_scaling(rope or scaling),
        norm_eps=float(source.get("rms_norm_eps", 1e-6)),
        is_tied=bool(source.get("tie_word_embeddings", False)),
        has_attention_bias=bool(source.get("attention_bias", False)),
        has_mlp_bias=bool(source.get("mlp_bias", False)),
    )


def _read_scaling(source: Mapping[str, Any]) -> RopeScaling | None:
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
    raise ValueError(f"config.json: rope_type={kind!r}: expected 'default', 'linear' or 'llama3'")


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Makes the Hugging Face configuration of ours."""
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
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.context,
        "rope_parameters": rope,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": config.has_attention_bias,
        "mlp_bias": config.has_mlp_bias,
    }


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Says where each of our tensors comes from; torch stores a linear layer as ``[out, in]``."""
    table = {
        "embedding": _transposed("model.embed_tokens.weight"),
        "final_norm": _same("model.norm.weight"),
    }
    if not config.is_tied:
        table["head"] = _transposed("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"layer_{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
        gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        table |= {
            f"{ours}/attention_norm": _same(f"{theirs}.input_layernorm.weight"),
            f"{ours}/mlp_norm": _same(f"{theirs}.post_attention_layernorm.weight"),
            f"{ours}/attention/qkv": _qkv(config, qkv, "weight"),
            f"{ours}/attention/out": _out(config, f"{attention}.o_proj.weight"),
            f"{ours}/mlp/gate_up": _gate_up(gate_up, "weight"),
            f"{ours}/mlp/down": _transposed(f"{mlp}.down_proj.weight"),
        }
        if config.has_attention_bias:
            table[f"{ours}/attention/qkv_bias"] = _qkv(config, qkv, "bias")
            table[f"{ours}/attention/out_bias"] = _same(f"{attention}.o_proj.bias")
        if config.has_mlp_bias:
            table[f"{ours}/mlp/gate_up_bias"] = _gate_up(gate_up, "bias")
            table[f"{ours}/mlp/down_bias"] = _same(f"{mlp}.down_proj.bias")
    return table


def _same(name: str) -> Rule:
    return Rule((name,), lambda x: x, lambda x: (x,))


def _transposed(name: str) -> Rule:
    return Rule((name,), np.transpose, lambda x: (np.transpose(x),))


def _out(config: ModelConfig, name: str) -> Rule:
    K, R, H, D = config.num_kv_heads, config.queries_per_kv_head, config.head_dim, config.width
    return Rule((name,), lambda w: w.T.reshape(K, R, H, D), lambda w: (w.reshape(K * R * H, D).T,))


def _qkv(config: ModelConfig, names: tuple[str, ...], suffix: str) -> Rule:
    K, R, H = config.num_kv_heads, config.queries_per_kv_head, config.head_dim

    def build(q, k, v):
        # [out, in] weights, or [out] biases: out is (kv head, query of the group, lane).
        parts = [x.reshape(K, heads, H, *x.shape[1:]) for x, heads in ((q, R), (k, 1), (v, 1))]
        fused = np.concatenate(parts, axis=1)
        return np.moveaxis(fused, -1, 0) if fused.ndim == 4 else fused

    def split(fused):
        fused = np.moveaxis(fused, 0, -1) if fused.ndim == 4 else fused
        parts = fused[:, :R], fused[:, R : R + 1], fused[:, R + 1 :]
        return tuple(part.reshape(-1, *part.shape[3:]) for part in parts)

    return Rule(tuple(f"{name}.{suffix}" for name in names), build, split)


def _gate_up(names: tuple[str, str], suffix: str) -> Rule:
    def build(gate, up):
        fused = np.stack([gate, up])
        return np.moveaxis(fused, -1, 0) if fused.ndim == 3 else fused

    def split(fused):
        fused = np.moveaxis(fused, 0, -1) if fused.ndim == 3 else fused
        return fused[0], fused[1]

    return Rule(tuple(f"{name}.{suffix}" for name in names), build, split)


FAMILY = Family("llama", read_config, write_config, rules)
