"""Our ``config.json``: a `ModelConfig` as JSON."""

import dataclasses
import itertools
import json
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union

from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.checks import check_integer
from bass_jax.runtime.files import read_json

NAME = "config.json"
RUN_SETTINGS = ("attention_implementation", "cache_dtype", "product_dtype", "tensor_axis", "expert_axes")
"""Fields that are chosen for a run and not stored."""


def write_config_json(directory: Path, config: ModelConfig) -> None:
    """Writes ``config.json`` to `directory`; consecutive equal layers are written once, with their count."""
    content = {key: value for key, value in dataclasses.asdict(config).items() if key not in RUN_SETTINGS}
    groups = [(layer, len(list(equal))) for layer, equal in itertools.groupby(config.layers)]
    content["layers"] = [{"count": count, **dataclasses.asdict(layer)} for layer, count in groups]
    (directory / NAME).write_text(json.dumps(content, indent=2) + "\n")


def without_run_settings(config: ModelConfig) -> ModelConfig:
    """Returns `config` with the defaults of the fields that are not stored."""
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.name in RUN_SETTINGS}
    return dataclasses.replace(config, **defaults)


def read_config_json(directory: Path) -> ModelConfig:
    """Reads ``config.json``.

    Raises:
        ValueError: naming the file and the key, if a key is missing, unknown or of another type.
    """
    path = directory / NAME
    content = read_json(path)
    try:
        if unknown := sorted(set(content) & set(RUN_SETTINGS)):
            raise ValueError(f"unknown key {unknown[0]!r}")
        content["layers"] = [
            # In older files the mixer is called "attention".
            {"mixer" if key == "attention" else key: value for key, value in layer.items() if key != "count"}
            for layer in content.get("layers", [])
            for _ in range(check_integer("count", layer.get("count", 1), 1))
        ]
        return _parse(ModelConfig, content, NAME)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _member(parts: tuple[Any, ...], value: Any) -> Any:
    """Returns the first dataclass of a union that has every key of `value`, or the first type of the union."""
    if isinstance(value, dict):
        for part in parts:
            if dataclasses.is_dataclass(part) and set(value) <= {field.name for field in dataclasses.fields(part)}:
                return part
    return parts[0]


def _parse(hint: Any, value: Any, name: str) -> Any:
    """Converts a value of a JSON file to the type `hint`.

    Raises:
        ValueError: naming the key, if a key is unknown or of another type.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _parse(_member(parts, value), value, name)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = typing.get_type_hints(hint)
        if unknown := sorted(set(value) - set(hints)):
            raise ValueError(f"unknown key {unknown[0]!r}")
        return hint(**{key: _parse(hints[key], own, key) for key, own in value.items()})  # type: ignore[operator]
    if origin is tuple and isinstance(value, list):
        return tuple(_parse(parts[0], own, name) for own in value)
    kind: Any = int | float if hint is float else origin or hint
    if value in parts if origin is Literal else isinstance(value, kind):
        return value
    raise ValueError(f"{name}={value!r}: expected {hint}")
