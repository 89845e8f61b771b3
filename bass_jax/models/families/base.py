"""What a model family has to say: how to read its configuration and where its tensors go."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bass_jax.config import ModelConfig

Read = Callable[[str], np.ndarray]
"""Reads one tensor of a checkpoint by its Hugging Face name."""


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


@dataclasses.dataclass(frozen=True)
class Family:
    """A weight layout.

    Attributes:
        name: the Hugging Face ``model_type``.
        read_config: makes our configuration from the Hugging Face one. Raises ValueError naming the key
            that it cannot honour.
        write_config: the Hugging Face configuration of ours.
        rules: our tensor's path, such as ``"layer_0/attention/qkv"``, → where it comes from.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], dict[str, Rule]]
