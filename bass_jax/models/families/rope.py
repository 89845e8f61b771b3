"""Rotary positions in a Hugging Face configuration: ``rope_parameters``, or ``rope_scaling`` before transformers 5."""

import math
from collections.abc import Mapping
from typing import Any

from bass_jax.models.families.base import read_flag, read_interval, read_number
from bass_jax.models.model_config import ModelConfig, RopeConfig, RopeScaling


def find_rope(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``rope_scaling`` if it is not empty, otherwise ``rope_parameters``, as `transformers` does.

    Raises:
        ValueError: if one of them is no dictionary.
    """
    for key in ("rope_scaling", "rope_parameters"):
        found = source.get(key)
        if found is not None and not isinstance(found, Mapping):
            raise ValueError(f"config.json: {key}={found!r}: expected a dictionary")
        if found:
            return found
    return {}


def read_rope(
    source: Mapping[str, Any], head_dim: int, *, default_base: float = 10000.0, default_share: float | None = None
) -> RopeConfig:
    """Returns rotary positions that are the same in all layers.

    Args:
        source: the Hugging Face configuration.
        head_dim: H.
        default_base: base without ``rope_theta``.
        default_share: share of the lanes that are rotated without ``partial_rotary_factor``; None for a family that
            rotates all lanes.

    Raises:
        ValueError: if a key is missing or has a value that the decoder does not support.
    """
    rope = find_rope(source)
    base = read_base(rope, read_number(source, "rope_theta", default_base))
    if default_share is None:
        for where in (source, rope):
            if (share := where.get("partial_rotary_factor")) not in (None, 1):
                raise ValueError(f"config.json: partial_rotary_factor={share!r}: expected 1")
        return RopeConfig(base, scaling=read_scaling(rope, source))
    default = read_number(source, "partial_rotary_factor", default_share)
    lanes = int(head_dim * read_number(rope, "partial_rotary_factor", default))
    return RopeConfig(base, None if lanes == head_dim else lanes, read_scaling(rope, source))


def read_typed_ropes(source: Mapping[str, Any], default_base: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the ``rope_parameters`` of the layers without a window, and of those with one.

    Args:
        source: the Hugging Face configuration.
        default_base: base of the layers without a window, without ``rope_theta``.

    Raises:
        ValueError: if the frequencies of layers with a window are scaled.
    """
    ropes = source.get("rope_parameters")
    ropes = {"full_attention": {"rope_type": "default"}} if ropes is None else ropes
    full, local = ropes.get("full_attention"), ropes.get("sliding_attention") or {}
    if source.get("rope_scaling") is not None:
        if full is None:
            raise ValueError("config.json: rope_scaling: expected rope_parameters with 'full_attention', or none")
        # As in `transformers`, an existing "rope_type" takes precedence over the older "type".
        full = {**full, **source["rope_scaling"]}
    if (kind := local.get("rope_type", local.get("type", "default"))) != "default":
        raise ValueError(f"config.json: rope_parameters: sliding_attention: rope_type={kind!r}: expected 'default'")
    return {"rope_theta": source.get("rope_theta", default_base), **(full or {})}, local


def write_typed_ropes(config: ModelConfig, default_base: float) -> dict[str, Any]:
    """Returns ``rope_parameters`` for each type of layers; `default_base` is for layers that `config` does not have."""
    attentions = [layer.attention for layer in config.layers]
    full = next((attention.rope for attention in attentions if attention.window is None), RopeConfig(default_base))
    windowed = next((attention.rope for attention in attentions if attention.window is not None), full)
    assert windowed is not None
    return {
        "full_attention": write_rope(full),
        "sliding_attention": {"rope_type": "default", "rope_theta": windowed.base},
    }


def read_rotated_layers(source: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Returns which layers have rotary positions. Despite its name, ``no_rope_layers`` is 1 for those that have."""
    layers = source.get("no_rope_layers")
    if layers is None:
        return read_interval(source, "no_rope_layer_interval", 4, num_layers)
    if not isinstance(layers, list) or len(layers) != num_layers or not all(type(one) is int for one in layers):
        raise ValueError(f"config.json: no_rope_layers={layers!r}: expected a list of {num_layers} integers")
    return [one != 0 for one in layers]


def read_base(rope: Mapping[str, Any], default: float) -> float:
    """Returns ``rope_theta``."""
    return read_number(rope, "rope_theta", default)


def read_scaling(rope: Mapping[str, Any], source: Mapping[str, Any]) -> RopeScaling | None:
    """Returns the scaling of ``rope_parameters`` or ``rope_scaling``.

    Args:
        rope: either of the two.
        source: the whole configuration. Its ``original_max_position_embeddings`` takes precedence over that of `rope`;
            the default of both is its ``max_position_embeddings``.

    Raises:
        ValueError: if the type is unknown, or the scaling differs between layers.
    """
    for key, value in rope.items():
        if isinstance(value, Mapping):
            raise ValueError(f"config.json: {key}: expected rotary positions that are the same in all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", read_number(rope, "factor"))
    if kind not in ("llama3", "yarn", "longrope"):
        raise ValueError(
            f"config.json: rope_type={kind!r}: expected 'default', 'linear', 'llama3', 'yarn' or 'longrope'"
        )
    context = source.get("max_position_embeddings")
    original = source.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", context))
    if not isinstance(original, int) or isinstance(original, bool) or original < 1:
        raise ValueError(f"config.json: original_max_position_embeddings={original!r}: expected a positive integer")
    if kind == "llama3":
        low, high = (read_number(rope, key) for key in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", read_number(rope, "factor"), low, high, original)
    return (_read_yarn if kind == "yarn" else _read_longrope)(rope, context, original)


def _read_longrope(rope: Mapping[str, Any], context: Any, original: int) -> RopeScaling:
    factors = [rope[key] for key in ("short_factor", "long_factor")]
    for key, values in zip(("short_factor", "long_factor"), factors, strict=True):
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise ValueError(f"config.json: {key}={values!r}: expected a list of numbers")
    factor = read_number(rope, "factor", None, is_nullable=True)
    if factor is None:
        if not isinstance(context, int):
            raise ValueError(f"config.json: max_position_embeddings={context!r}: expected an integer")
        factor = context / original
    return RopeScaling(
        "longrope",
        max(factor, 1.0),
        original_context=original,
        attention_factor=read_number(rope, "attention_factor", None, is_nullable=True),
        short_factors=tuple(map(float, factors[0])),
        long_factors=tuple(map(float, factors[1])),
    )


def _read_yarn(rope: Mapping[str, Any], context: Any, original: int) -> RopeScaling:
    if "factor" in rope and rope["factor"] is None and isinstance(context, int):
        rope = {**rope, "factor": context / original}
    factor = read_number(rope, "factor")
    attention_factor, own, of_all, fast, slow = (
        read_number(rope, key, None, is_nullable=True)
        for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    )
    if attention_factor is None and own and of_all and factor > 1:  # DeepSeek's keys.
        attention_factor = (0.1 * own * math.log(factor) + 1) / (0.1 * of_all * math.log(factor) + 1)
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=fast or 32.0,
        beta_slow=slow or 1.0,
        attention_factor=attention_factor,
        is_truncated=read_flag(rope, "truncate", True),
    )


def write_rope(config: RopeConfig | None) -> dict[str, Any]:
    """Returns ``rope_parameters``."""
    assert config is not None
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.base}
    if (scaling := config.scaling) is not None:
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
        if scaling.kind == "longrope":
            rope |= {
                "original_max_position_embeddings": scaling.original_context,
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "attention_factor": scaling.attention_factor,
            }
    return rope
