"""Qwen3-Next and Qwen3.5: recurrent layers with the gated delta rule, and attention with a gate in some layers.

Files may have a layer for multi-token prediction, ``mtp.*``.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from bass_jax.models.families import base, experts, llama, qwen_moe, tensor_names
from bass_jax.models.families.base import Family, Rule, read_integer, read_text_part
from bass_jax.models.families.tensor_layout import contiguous, empty
from bass_jax.models.model_config import AttentionConfig, DenseMLP, GatedDeltaConfig, ModelConfig


def read_next(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {"num_key_value_heads": 2, "intermediate_size": 5632, "norm_topk_prob": True}
    config = _read({**defaults, **source}, "qwen3_next")
    return _with_experts(config, {**defaults, **source}, {"experts": 512, "active": 10, "width": 512})


def read_3_5(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    return _read({"num_key_value_heads": 4, "intermediate_size": 12288, **source}, "qwen3_5_text")


def read_3_5_moe(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    # Keys of other families: all layers have experts, and the factors are always normalized.
    fixed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 1}
    source = {"num_key_value_heads": 2, **source, **fixed}
    if (num_experts := experts.read_num_experts(source, 256)) < 1:
        raise ValueError(f"config.json: num_experts={num_experts}: expected a positive integer")
    config = _read(source, "qwen3_5_moe_text")
    return _with_experts(config, source, {"experts": 256, "active": 8, "width": 512})


def _read(source: Mapping[str, Any], family: str) -> ModelConfig:
    defaults = {"head_dim": 256, "max_position_embeddings": 32768}
    config = llama.read_config({**defaults, **source, "mlp_bias": False}, family, rotary_share=0.25)
    layer = config.layers[0]
    norm = dataclasses.replace(layer.norm, offset=1.0)
    recurrence = GatedDeltaConfig(
        num_key_heads=read_integer(source, "linear_num_key_heads", 16),
        num_value_heads=read_integer(source, "linear_num_value_heads", 32),
        key_dim=read_integer(source, "linear_key_head_dim", 128),
        value_dim=read_integer(source, "linear_value_head_dim", 128),
        kernel_size=read_integer(source, "linear_conv_kernel_dim", 4),
        activation=layer.mlp.activation,
        norm=layer.norm,
    )
    attention = dataclasses.replace(layer.attention, qk_norm=norm, has_output_gate=True)
    layers = tuple(
        dataclasses.replace(layer, mixer=recurrence if is_recurrent else attention, norm=norm)
        for is_recurrent in _read_recurrent_layers(source, config.num_layers)
    )
    return dataclasses.replace(config, layers=layers, final_norm=norm)


def _read_recurrent_layers(source: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns which layers are recurrent."""
    types = base.read_layer_types(source, num_layers, ("linear_attention", "full_attention"))
    if types is None:
        return base.read_interval(source, "full_attention_interval", 4, num_layers)
    return [kind == "linear_attention" for kind in types]


def _with_experts(config: ModelConfig, source: Mapping[str, Any], defaults: Mapping[str, int]) -> ModelConfig:
    width = read_integer(source, "shared_expert_intermediate_size", 512)
    return qwen_moe.with_experts(config, source, defaults, DenseMLP(width, config.layers[0].mlp.activation))


def read_3_5_text_part(source: Mapping[str, Any]) -> ModelConfig:
    """Reads the configuration of a Qwen3.5 with a vision tower; its text model is that of ``qwen3_5_text``."""
    return read_3_5(read_text_part(source, "qwen3_5_text", is_tied=False))


def read_3_5_moe_text_part(source: Mapping[str, Any]) -> ModelConfig:
    """Reads the configuration of one with experts; its text model is that of ``qwen3_5_moe_text``."""
    return read_3_5_moe(read_text_part(source, "qwen3_5_moe_text", is_tied=False))


def write_next(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    dense = all(isinstance(layer.mlp, DenseMLP) for layer in config.layers)
    of_experts = {"num_experts": 0} if dense else _write_experts(config) | experts.write_sparse_layers(config)
    return _write(config, "Qwen3NextForCausalLM") | of_experts


def write_3_5(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    return _write(config, "Qwen3_5ForCausalLM")


def write_3_5_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration; see `Family.write_config`."""
    written = _write(config, "Qwen3_5MoeForCausalLM") | _write_experts(config)
    return {key: value for key, value in written.items() if key not in ("intermediate_size", "mlp_bias")}


def _write(config: ModelConfig, architecture: str) -> dict[str, Any]:
    written = llama.write_config(config, architecture)
    # Without it the default is a quarter.
    written["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    kinds = ["linear_attention" if layer.is_recurrent else "full_attention" for layer in config.layers]
    written["layer_types"] = kinds
    if config.recurrences:
        recurrence = config.recurrences[0]
        written |= {
            "linear_num_key_heads": recurrence.num_key_heads,
            "linear_num_value_heads": recurrence.num_value_heads,
            "linear_key_head_dim": recurrence.key_dim,
            "linear_value_head_dim": recurrence.value_dim,
            "linear_conv_kernel_dim": recurrence.kernel_size,
        }
    return written


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    moe = experts.find_moe(config)
    assert moe.shared is not None
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_active,
        "moe_intermediate_size": moe.width,
        "norm_topk_prob": moe.is_normalized,
        "shared_expert_intermediate_size": moe.shared.width,
    }


def canonical(name: str) -> str | None:
    """Ignores the vision tower and the layers for multi-token prediction; see `Family.canonical`."""
    if name.startswith(("mtp.", "model.visual.", "visual.")):
        return None
    return base.canonical(name.replace("model.language_model.", "model.", 1))


def rules(config: ModelConfig, *, is_split: bool) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`.

    Args:
        config: of the model.
        is_split: whether the inputs of the recurrent layers are projected by four tensors (Qwen3.5) instead of two.
    """
    recurrence = functools.partial(_recurrence, is_split=is_split)
    return llama.rules(config, attention=_attention, recurrence=recurrence)


def _attention(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    table = llama.attention_rules(config, theirs, width)
    for ours in ("qkv", "qkv_bias"):
        if ours in table:
            table[ours] = _gated_qkv(config, table[ours].sources)
    return table


def _gated_qkv(config: AttentionConfig, sources: tuple[str, ...]) -> Rule:
    """Returns the rule of queries with their gates, keys and values: stored are each head's query, then its gate."""
    N, K, R, H = config.num_heads, config.num_kv_heads, config.queries_per_kv_head, config.head_dim

    def build(q, k, v):
        rest = q.shape[1:]
        q = q.reshape(K, R, 2, H, *rest)
        parts = q[:, :, 0], k.reshape(K, 1, H, *rest), v.reshape(K, 1, H, *rest), q[:, :, 1]
        return np.concatenate(parts, axis=1, out=empty((K, 2 * R + 2, H, *rest), q.dtype))

    def split(fused):
        q, k, v, gates = np.split(fused, [R, R + 1, R + 2], axis=1)
        rest = fused.shape[3:]
        queries = np.stack((q, gates), axis=2).reshape(2 * N * H, *rest)
        return queries, k.reshape(K * H, *rest), v.reshape(K * H, *rest)

    return Rule(sources, build, split)


def _recurrence(config: GatedDeltaConfig, theirs: str, width: int, *, is_split: bool) -> dict[str, Rule]:
    K, R, A, V, D = config.num_key_heads, config.values_per_key, config.key_dim, config.value_dim, width
    projections = {
        "qkvz": tensor_names.reshaped(f"{theirs}.in_proj_qkvz.weight", (K, config.num_lanes + R * V, D), 2),
        "rates": tensor_names.reshaped(f"{theirs}.in_proj_ba.weight", (K, 2 * R, D), 2),
    }
    if is_split:
        qkvz = f"{theirs}.in_proj_qkv.weight", f"{theirs}.in_proj_z.weight"
        rates = f"{theirs}.in_proj_b.weight", f"{theirs}.in_proj_a.weight"
        projections = {
            "qkvz": Rule(
                qkvz,
                lambda qkv, z: _group((*np.split(qkv, [K * A, 2 * K * A]), z), K),
                lambda x: _join(_ungroup(x, (A, A, R * V, R * V))),
            ),
            "rates": Rule(rates, lambda b, a: _group((b, a), K), lambda x: _ungroup(x, (R, R))),
        }
    return projections | {
        "kernel": Rule(
            (f"{theirs}.conv1d.weight",),
            lambda x: _group(np.split(x[:, 0], [K * A, 2 * K * A]), K),
            lambda x: (np.concatenate(_ungroup(x, (A, A, R * V)))[:, None],),
        ),
        "decay_log": tensor_names.reshaped(f"{theirs}.A_log", (K, R), 1),
        "decay_bias": tensor_names.reshaped(f"{theirs}.dt_bias", (K, R), 1),
        "norm": tensor_names.same(f"{theirs}.norm.weight"),
        "out": Rule(
            (f"{theirs}.out_proj.weight",), lambda x: x.reshape(D, K, R, V), lambda x: (x.reshape(D, K * R * V),)
        ),
    }


def _group(parts, num_groups: int) -> np.ndarray:
    """Joins tensors whose first axis is grouped, ``[groups * n, D]`` each, to ``[groups, sum of n, D]``."""
    return contiguous(np.concatenate([part.reshape(num_groups, -1, part.shape[-1]) for part in parts], axis=1))


def _ungroup(joined: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Inverts `_group`; `sizes` are the n of the parts."""
    parts = np.split(joined, np.cumsum(sizes)[:-1], axis=1)
    return tuple(part.reshape(-1, joined.shape[-1]) for part in parts)


def _join(parts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Joins queries, keys and values; the gates stay apart."""
    return np.concatenate(parts[:3]), parts[3]


def mtp_names(config: ModelConfig) -> dict[str, str]:
    """Returns the stored names of the layer for multi-token prediction; see `Family.mtp_names`."""
    norms = {"token_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "final_norm": "norm"}
    tensors = {ours: f"mtp.{theirs}.weight" for ours, theirs in ({"fc": "fc"} | norms).items()}
    return tensors | {"layer": "mtp.layers.0"}


_family = functools.partial(Family, canonical=canonical, mtp_names=mtp_names)

QWEN3_NEXT = _family("qwen3_next", read_next, write_next, functools.partial(rules, is_split=False))
QWEN3_5 = _family("qwen3_5_text", read_3_5, write_3_5, functools.partial(rules, is_split=True))
QWEN3_5_MOE = _family("qwen3_5_moe_text", read_3_5_moe, write_3_5_moe, functools.partial(rules, is_split=True))
QWEN3_5_PART = dataclasses.replace(QWEN3_5, name="qwen3_5", read_config=read_3_5_text_part)
QWEN3_5_MOE_PART = dataclasses.replace(QWEN3_5_MOE, name="qwen3_5_moe", read_config=read_3_5_moe_text_part)
