"""Our ``config.json``: a `ModelConfig` as JSON."""

import dataclasses
import json
import typing
from pathlib import Path

from bass_jax.checkpoint.manifest import read_json
from bass_jax.config import ModelConfig, RopeScaling

NAME = "config.json"
RUN_SETTINGS = ("attention",)
"""Fields that a run chooses and a checkpoint does not keep."""


def write_config(directory: Path, config: ModelConfig) -> None:
    """Writes ``config.json`` into `directory`."""
    content = {key: value for key, value in dataclasses.asdict(config).items() if key not in RUN_SETTINGS}
    (directory / NAME).write_text(json.dumps(content, indent=2) + "\n")


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
        for key, value in content.items():
            kind = hints[key] | int if hints[key] is float else hints[key]
            if not isinstance(value, kind):
                raise ValueError(f"{key}={value!r}: expected {hints[key]}")
        return ModelConfig(**content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
