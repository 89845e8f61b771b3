"""Llama 4: attention in chunks, some layers without rotary positions, and experts whose inputs the router scales."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bass_jax.models.families import base, experts, llama, tensor_names
from bass_jax.models.families.base import Family, Rule, read_flag, read_integer, read_number, read_text_part
from bass_jax.models.families.rope import read_rotated_layers
from bass_jax.models.model_config import AttentionConfig, DenseMLP, ModelConfig, MoEConfig, NormConfig


def read_text(source: Mapping[str, Any]) -> ModelConfig:
    """Reads a configuration; see `Family.read_config`."""
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 8192,
    }
    config = llama.read_config({**defaults, **source, "mlp_bias": False}, "llama4_text", rope_base=500000.0)
    is_rotated, is_sparse = read_rotated_layers(source, config.num_layers), _read_sparse_layers(source)
    chunk = None
    if source.get("attention_chunk_size", 8192) is not None:
        chunk = read_integer(source, "attention_chunk_size", 8192)
    is_chunked = _read_chunked_layers(source, [rotated and chunk is not None for rotated in is_rotated])
    if any(is_chunked) and chunk is None:
        raise ValueError("config.json: attention_chunk_size=None: expected a size, because layers have chunks")
    expert = config.layers[0].mlp
    moe = MoEConfig(
        read_integer(source, "num_local_experts", 16),
        read_integer(source, "num_experts_per_tok", 1),
        expert.width,
        expert.activation,
        score="sigmoid",
        is_normalized=False,
        scales_input=True,
        shared=DenseMLP(expert.width, expert.activation),
    )
    dense = dataclasses.replace(expert, width=read_integer(source, "intermediate_size_mlp", 16384))
    norm = NormConfig("rms", config.layers[0].norm.eps) if read_flag(source, "use_qk_norm", True) else None
    # Read even if they are not used, so that an invalid value is an error.
    step, scale = read_integer(source, "floor_scale", 8192), read_number(source, "attn_scale", 0.1)
    is_tuned = read_flag(source, "attn_temperature_tuning", True)
    plain = {"rope": None} | ({"temperature_scale": scale, "temperature_step": step} if is_tuned else {})
    rotated = {"qk_norm": norm, "qk_norm_span": "rotated_head"}
    layers = [
        dataclasses.replace(
            layer,
            mixer=dataclasses.replace(
                layer.attention,
                chunk=chunk if is_chunked[i] else None,
                **(rotated if is_rotated[i] else plain),
            ),
            mlp=moe if is_sparse(i) else dense,
        )
        for i, layer in enumerate(config.layers)
    ]
    return dataclasses.replace(config, layers=tuple(layers))


def read_text_of_composite(source: Mapping[str, Any]) -> ModelConfig:
    """Reads the configuration of a Llama 4 with a vision tower; its text model is that of ``llama4_text``."""
    return read_text(read_text_part(source, "llama4_text", is_tied=False))


def _read_sparse_layers(source: Mapping[str, Any]) -> Callable[[int], bool]:
    """Returns a function that tells whether the layer of an index has experts."""
    layers = source.get("moe_layers")
    if layers is None:
        step = read_integer(source, "interleave_moe_layer_step", 1)
        if step < 1:
            raise ValueError(f"config.json: interleave_moe_layer_step={step}: expected a positive integer")
        return lambda i: (i + 1) % step == 0
    if not isinstance(layers, list) or not all(type(one) is int for one in layers):
        raise ValueError(f"config.json: moe_layers={layers!r}: expected a list of integers")
    return lambda i: i in layers


def _read_chunked_layers(source: Mapping[str, Any], default: list[bool]) -> list[bool]:
    types = base.read_layer_types(source, len(default), ("chunked_attention", "full_attention"))
    return default if types is None else [kind == "chunked_attention" for kind in types]


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes a configuration as that of ``llama4_text``; see `Family.write_config`."""
    moe, attentions = experts.find_moe(config), [layer.attention for layer in config.layers]
    tuned = [attention for attention in attentions if attention.temperature_scale is not None]
    dense = next((layer.mlp.width for layer in config.layers if isinstance(layer.mlp, DenseMLP)), moe.width)
    tuning = {"attn_scale": tuned[0].temperature_scale, "floor_scale": tuned[0].temperature_step} if tuned else {}
    return (
        llama.write_config(config, "Llama4ForCausalLM")
        | tuning
        | {
            "intermediate_size": moe.width,
            "intermediate_size_mlp": dense,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_active,
            "moe_layers": [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoEConfig)],
            "use_qk_norm": any(attention.qk_norm is not None for attention in attentions),
            "no_rope_layers": [int(attention.rope is not None) for attention in attentions],
            "attention_chunk_size": next((one.chunk for one in attentions if one.chunk is not None), None),
            "layer_types": ["full_attention" if one.chunk is None else "chunked_attention" for one in attentions],
            "attn_temperature_tuning": bool(tuned),
        }
    )


def canonical(name: str) -> str | None:
    """Ignores the vision tower, and removes the prefix of the text part; see `Family.canonical`."""
    if name.startswith(("vision_model.", "multi_modal_projector.")):
        return None
    return base.canonical(name.removeprefix("language_model."))


def rules(config: ModelConfig) -> dict[str, Rule]:
    """Returns the rules; see `Family.rules`."""
    return llama.rules(config, attention=_attention, mlp=_mlp)


def _attention(config: AttentionConfig, theirs: str, width: int) -> dict[str, Rule]:
    # The norm has no scales.
    plain = dataclasses.replace(config, qk_norm=None)
    return tensor_names.interleaved(plain, llama.attention_rules(plain, theirs, width))


def _mlp(config: DenseMLP | MoEConfig, theirs: str) -> dict[str, Rule]:
    stored = f"{theirs}.feed_forward"
    if not isinstance(config, MoEConfig):
        return tensor_names.gated_mlp(config, stored)
    assert config.shared is not None
    E, F = config.num_experts, config.width
    return {
        "router": tensor_names.same(f"{stored}.router.weight"),
        "experts_gate_up": Rule(
            (f"{stored}.experts.gate_up_proj",),
            lambda x: x.swapaxes(1, 2).reshape(E, 2, F, -1),
            lambda x: (x.reshape(E, 2 * F, -1).swapaxes(1, 2),),
        ),
        "experts_down": Rule(
            (f"{stored}.experts.down_proj",), lambda x: x.swapaxes(1, 2), lambda x: (x.swapaxes(1, 2),)
        ),
        **tensor_names.under("shared", tensor_names.gated_mlp(config.shared, f"{stored}.shared_expert")),
    }


TEXT = Family("llama4_text", read_text, write_config, rules, canonical)
TEXT_PART = Family("llama4", read_text_of_composite, write_config, rules, canonical)
