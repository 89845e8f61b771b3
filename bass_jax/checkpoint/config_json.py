"""Our ``config.json``: a `ModelConfig` as JSON."""

import dataclasses
import json
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union

from bass_jax.models.model_config import ModelConfig, RopeScaling
from bass_jax.runtime.files import read_json

NAME = "config.json"
RUN_SETTINGS = ("attention", "cache_dtype", "product_dtype", "tensor_axis")
"""Fields that a run chooses and a checkpoint does not keep."""


def write_config(directory: Path, config: ModelConfig) -> None:
    """Writes ``config.json`` into `directory`."""
    content = {key: value for key, value in dataclasses.asdict(config).items() if key not in RUN_SETTINGS}
    (directory / NAME).write_text(json.dumps(content, indent=2) + "\n")


def without_run_settings(config: ModelConfig) -> ModelConfig:
    """Returns `config` as it is read back."""
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.name in RUN_SETTINGS}
    return dataclasses.replace(config, **defaults)


def read_config(directory: Path) -> ModelConfig:
    """Reads ``config.json``.

    Raises:
        ValueError: naming the file and the key, if one is missing, unknown or of another type.
    """
    path = directory / NAME
    content = read_json(path)
    hints = typing.get_type_hints(ModelConfig)
    if unknown := sorted(set(content) - (set(hints) - set(RUN_SETTINGS))):
        raise ValueError(f"{path}: unknown key {unknown[0]!r}")
    try:
        if content.get("rope_scaling") is not None:
            content["rope_scaling"] = RopeScaling(**content["rope_scaling"])
        if isinstance(content.get("windowed_layers"), list):
            content["windowed_layers"] = tuple(content["windowed_layers"])
        for key, value in content.items():
            if not _fits(value, hints[key]):
                raise ValueError(f"{key}={value!r}: expected {hints[key]}")
        return ModelConfig(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(part, typing.get_args(hint)[0]) for part in value)
    return isinstance(value, int | float if hint is float else hint)
