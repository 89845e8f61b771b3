"""DeepSeek-V2 and DeepSeek-V3: latent attention, experts in groups, and shared experts.

Files hold neighboring rotated lanes, except those of V3 with ``rope_interleave`` false, and each head's lanes without
rotary positions before the rotated ones. V3 may also have a layer for multi-token prediction behind the last one.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bass_jax.models.families import experts, llama, rope, tensor_names
from bass_jax.models.families.base import (
    Family,
    Rule,
    check_aliases,
    read_flag,
    read_integer,
    read_number,
    require_values,
)
from bass_jax.models.model_config import AttentionConfig, DenseMLP, LatentConfig, ModelConfig, MoEConfig


def read_v2(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    require_values(source, scoring_func="softmax", norm_topk_prob=False)
    method = source.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"config.json: topk_method={method!r}: expected 'greedy' or 'group_limited_greedy'")
    has_groups = method == "group_limited_greedy"
    router = {
        "is_normalized": False,
        "num_groups": read_integer(source, "n_group") if has_groups else 1,
        "num_active_groups": read_integer(source, "topk_group") if has_groups else 1,
        "num_group_scores": 1,
    }
    source = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, **source}
    return _read({"first_k_dense_replace": 0, **source}, "deepseek_v2", router, 1.0)


def read_v3(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    require_values(source, scoring_func="sigmoid", topk_method="noaux_tc")
    router = {
        "score": "sigmoid",
        "has_choice_bias": True,
        "is_normalized": read_flag(source, "norm_topk_prob", True),
        "num_groups": read_integer(source, "n_group", 8),
        "num_active_groups": read_integer(source, "topk_group", 4),
    }
    # `transformers` has no biases in the MLPs, and 128 key-value heads if the file does not say how many.
    defaults = {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
    defaults |= {"first_k_dense_replace": 3, "max_position_embeddings": 4096, "num_key_value_heads": 128}
    rotated = read_integer(source, "qk_rope_head_dim", 64)
    if source.get("head_dim", rotated) != rotated:
        raise ValueError(f"config.json: head_dim={source['head_dim']!r}: expected {rotated}, the qk_rope_head_dim")
    source = {**defaults, **source, "mlp_bias": False}
    return _read(source, "deepseek_v3", router, 2.5, is_interleaved=read_flag(source, "rope_interleave", True))


def _read(
    source: Mapping[str, Any], family: str, router: dict[str, Any], scale: float, *, is_interleaved: bool = True
) -> ModelConfig:
    check_aliases(source, {"num_experts" if family == "deepseek_v2" else "num_local_experts": "n_routed_experts"})
    require_values(source, moe_layer_freq=1)
    num_heads = read_integer(source, "num_attention_heads")
    if source.get("num_key_value_heads") not in (None, num_heads):
        found = source["num_key_value_heads"]
        raise ValueError(f"config.json: num_key_value_heads={found!r}: expected {num_heads}, as many as query heads")
    rotated = read_integer(source, "qk_rope_head_dim", 64)
    # One head of the rotated lanes, whose rotary positions are read as those of any attention.
    config = llama.read_config({**source, "num_key_value_heads": num_heads, "head_dim": rotated}, family)
    of_head, mlp = config.layers[0].attention, config.layers[0].mlp
    assert of_head.rope is not None
    latent = LatentConfig(
        key_dim=read_integer(source, "qk_nope_head_dim", 128),
        value_dim=read_integer(source, "v_head_dim", 128),
        query_rank=None if source.get("q_lora_rank", 1536) is None else read_integer(source, "q_lora_rank", 1536),
        is_interleaved=is_interleaved,
    )
    attention = dataclasses.replace(
        of_head,
        num_kv_heads=1,
        head_dim=rotated + read_integer(source, "kv_lora_rank", 512),
        rope=dataclasses.replace(of_head.rope, rotary_dim=rotated),
        scale=_read_scale(source, latent.key_dim + rotated),
        latent=latent,
    )
    layers = tuple(dataclasses.replace(layer, mixer=attention) for layer in config.layers)
    width, num_shared = (read_integer(source, key) for key in ("moe_intermediate_size", "n_shared_experts"))
    moe = MoEConfig(
        read_integer(source, "n_routed_experts"),
        read_integer(source, "num_experts_per_tok"),
        width,
        mlp.activation,
        scale=read_number(source, "routed_scaling_factor", scale),
        shared=DenseMLP(width * num_shared, mlp.activation, has_bias=mlp.has_bias),
        **router,
    )
    num_dense = read_integer(source, "first_k_dense_replace")
    return experts.change_mlps(dataclasses.replace(config, layers=layers), lambda i: i >= num_dense, moe)


def _read_scale(source: Mapping[str, Any], head_dim: int) -> float:
    """Returns the factor on the scores. A scaling of the rotary positions may change it."""
    found = rope.find_rope(source)
    mscale = read_number(found, "mscale_all_dim", 0.0)
    if not mscale or found.get("rope_type", found.get("type", "default")) == "default":
        return head_dim**-0.5
    return head_dim**-0.5 * _temperature(mscale, read_number(found, "factor")) ** 2


def _temperature(mscale: float, factor: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_v2(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    moe = experts.find_moe(config)
    groups = {"n_group": moe.num_groups, "topk_group": moe.num_active_groups}
    method = {"topk_method": "group_limited_greedy", **groups} if moe.num_groups > 1 else {"topk_method": "greedy"}
    return _write(config, "DeepseekV2ForCausalLM") | method


def write_v3(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    moe, latent = experts.find_moe(config), config.layers[0].attention.latent
    assert latent is not None
    return _write(config, "DeepseekV3ForCausalLM") | {
        "n_group": moe.num_groups,
        "topk_group": moe.num_active_groups,
        "norm_topk_prob": moe.is_normalized,
        "rope_interleave": latent.is_interleaved,
    }


def _write(config: ModelConfig, architecture: str) -> dict[str, Any]:
    moe, attention = experts.find_moe(config), config.layers[0].attention
    latent, rotary = attention.latent, attention.rope
    assert latent is not None and rotary is not None and attention.scale is not None and moe.shared is not None
    rotated, written = rotary.rotary_dim or 0, llama.write_config(config, architecture)
    ropes = rope.write_rope(rotary)
    temperature = math.sqrt(attention.scale * math.sqrt(latent.key_dim + rotated))
    if rotary.scaling is not None and rotary.scaling.factor > 1:
        ropes["mscale_all_dim"] = round((temperature - 1.0) / (0.1 * math.log(rotary.scaling.factor)), 9)
    return (
        {"intermediate_size": moe.width, "mlp_bias": moe.shared.has_bias}
        | written
        | {
            "num_key_value_heads": attention.num_heads,
            "head_dim": rotated,
            "kv_lora_rank": attention.head_dim - rotated,
            "q_lora_rank": latent.query_rank,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": latent.key_dim,
            "v_head_dim": latent.value_dim,
            "rope_parameters": ropes,
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "n_shared_experts": moe.shared.width // moe.width,
            "moe_intermediate_size": moe.width,
            "routed_scaling_factor": moe.scale,
            "first_k_dense_replace": sum(isinstance(layer.mlp, DenseMLP) for layer in config.layers),
        }
    )


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    return llama.rules(config, attention=_attention, mlp=_mlp)


def _mlp(config: DenseMLP | MoEConfig, theirs: str) -> dict[str, Rule]:
    if isinstance(config, MoEConfig):
        return tensor_names.experts(config, f"{theirs}.mlp", shared="shared_experts")
    return tensor_names.gated_mlp(config, f"{theirs}.mlp")


def _attention(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    latent, rotary = config.latent, config.rope
    assert latent is not None and rotary is not None and rotary.rotary_dim is not None
    N, P, A, V = config.num_heads, rotary.rotary_dim, latent.key_dim, latent.value_dim
    halves = [*range(0, P, 2), *range(1, P, 2)] if latent.is_interleaved else [*range(P)]

    def rotated_first(name: str, num_others: int, num_heads: int | None = None) -> Rule:
        """Returns a rule for rows, by head if `num_heads` is not None, of which the last P are rotated."""
        order = np.array([*(num_others + np.array(halves)), *range(num_others)])
        heads = () if num_heads is None else (num_heads,)

        def build(x):
            return np.take(x.reshape(*heads, len(order), *x.shape[1:]), order, axis=len(heads))

        def split(x):
            stored = np.take(x, np.argsort(order), axis=len(heads))
            return (stored.reshape(-1, *x.shape[len(heads) + 1 :]),)

        return Rule((f"{theirs}.{name}",), build, split)

    compressed = config.head_dim - P
    table = {
        "query_up": rotated_first("q_proj.weight" if latent.query_rank is None else "q_b_proj.weight", A, N),
        "latent": rotated_first("kv_a_proj_with_mqa.weight", compressed),
        "latent_norm": tensor_names.same(f"{theirs}.kv_a_layernorm.weight"),
        "kv_up": tensor_names.reshaped(f"{theirs}.kv_b_proj.weight", (N, A + V, compressed), 2),
    }
    if latent.query_rank is not None:
        table["query_down"] = tensor_names.same(f"{theirs}.q_a_proj.weight")
        table["query_norm"] = tensor_names.same(f"{theirs}.q_a_layernorm.weight")
        if config.has_bias:
            table["query_down_bias"] = tensor_names.same(f"{theirs}.q_a_proj.bias")
    if config.has_bias:
        table["latent_bias"] = rotated_first("kv_a_proj_with_mqa.bias", compressed)
    values = AttentionConfig(N, N, V, rope=None, has_bias=config.has_bias)
    return table | tensor_names.attention_out(values, f"{theirs}.o_proj", width)


def mtp_names(config: ModelConfig) -> dict[str, str]:
    """Returns the stored names of the layer for multi-token prediction; see `Family.mtp_names`."""
    layer = f"model.layers.{config.num_layers}"
    names = {"fc": "eh_proj", "token_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head.norm"}
    return {ours: f"{layer}.{theirs}.weight" for ours, theirs in names.items()} | {"layer": layer}


V2 = Family("deepseek_v2", read_v2, write_v2, rules)
V3 = Family("deepseek_v3", read_v3, write_v3, rules, has_extra_layers=True, mtp_names=mtp_names)
