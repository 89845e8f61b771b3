"""Sliding windows in a Hugging Face configuration: their size, and the layers that have one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bass_jax.models.families.base import read_integer
from bass_jax.models.model_config import ModelConfig, RopeConfig


def read_window(source: Mapping[str, Any]) -> int | None:
    """Returns the size of the windows."""
    return None if source.get("sliding_window", 4096) is None else read_integer(source, "sliding_window", 4096)


def read_windows(source: Mapping[str, Any], window: int | None, default: Sequence[bool]) -> list[int | None]:
    """Returns the window of each layer, None for none.

    Args:
        source: the Hugging Face configuration.
        window: size of the windows, None for no windows.
        default: whether each layer has a window if there are no ``layer_types``.

    Raises:
        ValueError: if a layer has an unknown type, or has a window while `window` is None.
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
    """Returns ``layer_types``."""
    windows = (layer.attention.window for layer in config.layers)
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def write_window(config: ModelConfig) -> int | None:
    """Returns the size of the windows, None if no layer has one."""
    return next((layer.attention.window for layer in config.layers if layer.attention.window is not None), None)


def change_windowed_rope(config: ModelConfig, rope: RopeConfig | None) -> ModelConfig:
    """Returns `config` with other rotary positions in the layers that have a window."""
    layers = (
        layer
        if layer.attention.window is None
        else dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, rope=rope))
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=tuple(layers))


def change_attention(config: ModelConfig, windows: Sequence[int | None], **changes: Any) -> ModelConfig:
    """Returns `config` with a window per layer and other changes of every layer's attention."""
    layers = [
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, window=window, **changes))
        for layer, window in zip(config.layers, windows, strict=True)
    ]
    return dataclasses.replace(config, layers=tuple(layers))
