"""Sliding windows in a Hugging Face configuration: a size, and the layers that have it."""

from collections.abc import Mapping, Sequence
from typing import Any

from bass_jax.models.model_config import ModelConfig


def read_windows(source: Mapping[str, Any], window: int | None, default: Sequence[bool]) -> dict[str, Any]:
    """Reads which layers have the window.

    Args:
        source: the Hugging Face configuration.
        window: its size; None where there is none.
        default: for each layer whether it has the window, where ``layer_types`` does not say.

    Returns:
        ``window`` and ``windowed_layers`` of `ModelConfig`.

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
    if not any(windowed):
        return {"window": None, "windowed_layers": None}
    if window is None:
        raise ValueError("config.json: sliding_window: expected a size, because layer_types has 'sliding_attention'")
    return {"window": window, "windowed_layers": None if all(windowed) else windowed}


def write_layer_types(config: ModelConfig) -> list[str]:
    """Makes ``layer_types``."""
    windows = (config.window_of(i) for i in range(config.num_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]
