"""What a model family has to say: how to read its configuration and where its tensors go."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.checks import check_integer

MAX_LAYERS = 1000
"""The largest number of layers that is read: a configuration holds an object per layer."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Where one of our tensors comes from.

    Attributes:
        sources: Hugging Face names of the tensors that it is made of.
        build: makes it from them, in order; returns the array in our layout.
        split: inverts `build`; returns the tensors in the order of `sources`.
    """

    sources: tuple[str, ...]
    build: Callable[..., np.ndarray]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]


def canonical(name: str) -> str | None:
    """Keeps a stored name, unless the tensor says nothing that the configuration does not."""
    return None if name.endswith("rotary_emb.inv_freq") else name


@dataclasses.dataclass(frozen=True)
class Family:
    """A weight layout.

    Attributes:
        name: the Hugging Face ``model_type``.
        read_config: makes our configuration from the Hugging Face one. Raises ValueError naming the key
            that it cannot honour.
        write_config: the Hugging Face configuration of ours.
        rules: our tensor's path, such as ``"layer_0/attention/qkv"``, → where it comes from.
        canonical: a stored tensor's name → the name that `rules` use; None for one to be left out, such as
            a mask that old checkpoints carry.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], dict[str, Rule]]
    canonical: Callable[[str], str | None] = canonical


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
"""Hugging Face's names of activations → ours."""

WRITTEN_ACTIVATIONS = {"silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


_REQUIRED: Any = object()


def read_integer(source: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, is_nullable: bool = False) -> Any:
    """Reads an integer.

    Args:
        source: the Hugging Face configuration.
        key: to read.
        default: where the key is absent, and where it is null if that may be.
        is_nullable: null is as good as absent. Elsewhere `transformers` refuses it, and so do we.

    Raises:
        ValueError: if it is no integer, or is absent without a default.
    """
    return _read(source, key, default, is_nullable, (int,), "an integer")


def read_num_layers(source: Mapping[str, Any], key: str) -> int:
    """Reads the number of layers, at most `MAX_LAYERS`; otherwise as `read_integer`."""
    return check_integer(f"config.json: {key}", read_integer(source, key), 1, MAX_LAYERS)


def read_number(source: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, is_nullable: bool = False) -> Any:
    """Reads a finite number as a float; arguments and errors are those of `read_integer`."""
    value = _read(source, key, default, is_nullable, (int, float), "a number")
    if value is not None and not math.isfinite(value):
        raise ValueError(f"config.json: {key}={value!r}: expected a finite number")
    return None if value is None else float(value)


def read_flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    """Reads true or false; arguments and errors are those of `read_integer`."""
    value = source.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={value!r}: expected true or false")
    return value


def _read(source: Mapping[str, Any], key: str, default: Any, is_nullable: bool, kinds: tuple, expected: str) -> Any:
    value = source.get(key) if default is _REQUIRED else source.get(key, default)
    if value is None and is_nullable:
        return default
    if key not in source:
        if default is _REQUIRED:
            raise KeyError(key)
        if default is None:  # What stands in the file cannot be null.
            return None
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"config.json: {key}={value!r}: expected {expected}")
    return value


def read_activation(source: Mapping[str, Any], key: str, default: str) -> Any:
    """Reads an activation as our name of it.

    Raises:
        ValueError: if it is unknown.
    """
    name = source.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"config.json: {key}={name!r}: expected one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def refuse(source: Mapping[str, Any], **unsupported: Any) -> None:
    """Refuses keys that ask for what this decoder does not do.

    Args:
        source: the Hugging Face configuration.
        **unsupported: key → the only value that is supported; an absent key has it.

    Raises:
        ValueError: naming the first that has another value.
    """
    for key, only in unsupported.items():
        if source.get(key, only) != only:
            raise ValueError(f"config.json: {key}={source[key]!r}: expected {only!r}")


def check_common(source: Mapping[str, Any]) -> None:
    """Refuses what a configuration of any family can ask for and no decoder here does.

    Raises:
        ValueError: naming the key.
    """
    refuse(source, is_causal=True, quantization_config=None, add_cross_attention=False)


def refuse_aliases(source: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
    """Refuses a second name of a key, where it says something else.

    `transformers` reads both names into one attribute, so the one that it reads last wins.

    Args:
        source: the Hugging Face configuration.
        aliases: second name → key.

    Raises:
        ValueError: naming both.
    """
    for alias, key in aliases.items():
        if alias in source and source[alias] != source.get(key):
            raise ValueError(
                f"config.json: {alias}={source[alias]!r} and {key}={source.get(key)!r}: expected only {key}"
            )
