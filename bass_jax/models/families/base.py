"""What a model family has to say: how to read its configuration and where its tensors go."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bass_jax.config import ModelConfig


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


def read_integer(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Reads an integer; `default` where the key is absent or null.

    Raises:
        ValueError: if it is none, or is absent without a default.
    """
    value = source.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int):
        raise ValueError(f"config.json: {key}={value!r}: expected an integer")
    return value


def read_activation(source: Mapping[str, Any], key: str, default: str) -> Any:
    """Reads an activation as our name of it.

    Raises:
        ValueError: if it is unknown.
    """
    name = source.get(key) or default
    if name not in ACTIVATIONS:
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
