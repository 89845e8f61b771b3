"""Sliding windows in a Hugging Face configuration: a size, and the layers that have it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bass_jax.models.model_config import ModelConfig


def read_windows(source: Mapping[str, Any], window: int | None, default: Sequence[bool]) -> list[int | None]:
    """Reads which layers have the window.

    Args:
        source: the Hugging Face configuration.
        window: its size; None where there is none.
        default: for each layer whether it has the window, where ``layer_types`` does not say.

    Returns:
        The window of each layer, None for none.

    Raises:
        ValueError: if a layer is of another type, or has a window that has no size.
    """
    types = source.get("layer_types")
    if types is None:
        windowed = tuple(default)
    else:
        if not isinstance(types, list) or len(types) != len(default):
            raise ValueError(f"config.json: layer_types={types!r}: expected a list of {len(default)}")
        for kind in types:
            if kind not in ("sliding_attention", "full_attention"):
                raise ValueError(
                    f"config.json: layer_types: {kind!r}: expected 'sliding_attention' or 'full_attention'"
                )
        windowed = tuple(kind == "sliding_attention" for kind in types)
    if any(windowed) and window is None:
        raise ValueError("config.json: sliding_window: expected a size, because layer_types has 'sliding_attention'")
    return [window if is_windowed else None for is_windowed in windowed]


def write_layer_types(config: ModelConfig) -> list[str]:
    """Makes ``layer_types``."""
    windows = (layer.attention.window for layer in config.layers)
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def write_window(config: ModelConfig) -> int | None:
    """Returns the size of the window; None where no layer has one."""
    return next((layer.attention.window for layer in config.layers if layer.attention.window is not None), None)


def change_attention(config: ModelConfig, windows: Sequence[int | None], **changes: Any) -> ModelConfig:
    """Returns a configuration with the window of each layer, and fields of every layer's attention, changed."""
    attentions = [dataclasses.replace(config.layers[0].attention, window=window, **changes) for window in windows]
    layers = zip(config.layers, attentions, strict=True)
    return dataclasses.replace(
        config, layers=tuple(dataclasses.replace(layer, attention=attention) for layer, attention in layers)
    )
