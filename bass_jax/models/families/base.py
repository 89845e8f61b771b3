"""The interface of a model family, and helpers that read Hugging Face configurations."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.checks import check_integer

MAX_LAYERS = 1000
"""The largest number of layers that is read, because a configuration holds an object per layer."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of our tensors is made of stored ones.

    Attributes:
        sources: Hugging Face names of the stored tensors.
        build: returns our tensor from them, given in this order.
        split: inverts `build`.
        alternative: another form that files may have instead. It is read if all of its tensors exist, never written.
        is_packed: whether the stored tensors are bytes, which `build` makes numbers of.
    """

    sources: tuple[str, ...]
    build: Callable[..., np.ndarray]
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    alternative: "Rule | None" = None
    is_packed: bool = False

    def renamed(self, rename: Callable[[str], str]) -> "Rule":
        """Returns the rule for tensors with other stored names."""
        other = None if self.alternative is None else self.alternative.renamed(rename)
        return dataclasses.replace(self, sources=tuple(map(rename, self.sources)), alternative=other)

    def form_in(self, names: Set[str]) -> "Rule":
        """Returns the first form of the rule whose tensors are in `names`, this one if there is none."""
        if self.alternative is None or names >= set(self.sources):
            return self
        other = self.alternative.form_in(names)
        return other if names >= set(other.sources) else self


def canonical(name: str) -> str | None:
    """Returns a stored name, or None for a tensor that the configuration determines."""
    return None if name.endswith("rotary_emb.inv_freq") else name


@dataclasses.dataclass(frozen=True)
class Family:
    """A weight layout of Hugging Face.

    Attributes:
        name: the Hugging Face ``model_type``.
        read_config: returns our configuration for a Hugging Face one. Raises ValueError naming the key if a key is
            missing or has a value that the decoder does not support.
        write_config: inverts `read_config`.
        rules: returns a `Rule` for the path of each of our tensors, such as ``"layer_0/attention/qkv"``.
        canonical: returns the name that `rules` use for the name of a stored tensor; None for a tensor to ignore, such
            as the attention masks of old checkpoints.
        has_extra_layers: whether files may have layers behind the last one, ``model.layers.{L}`` and so on, which
            predict further tokens and are not read with the model.
        mtp_names: returns the stored names of a layer for multi-token prediction: of its tensors ``"fc"``,
            ``"token_norm"``, ``"hidden_norm"`` and ``"final_norm"``, and of its ``"layer"``. None for a family without.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], dict[str, Rule]]
    canonical: Callable[[str], str | None] = canonical
    has_extra_layers: bool = False
    mtp_names: Callable[[ModelConfig], dict[str, str]] | None = None

    def canonical_in(self, config: ModelConfig) -> Callable[[str], str | None]:
        """Returns `canonical`, which also ignores the layers behind the last one if the family may have some."""
        if not self.has_extra_layers:
            return self.canonical

        def known(name: str) -> str | None:
            index = re.match(r"model\.layers\.(\d+)\.", name)
            return None if index and int(index[1]) >= config.num_layers else self.canonical(name)

        return known


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}
"""Hugging Face's names of activations → ours."""

WRITTEN_ACTIVATIONS = {"silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Our names of activations → Hugging Face's."""

_REQUIRED: Any = object()


def read_integer(source: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, is_nullable: bool = False) -> Any:
    """Returns the integer value of a key.

    Args:
        source: the Hugging Face configuration.
        key: the key.
        default: returned if the key is absent.
        is_nullable: null also stands for the default. For other keys `transformers` rejects null.

    Raises:
        ValueError: if the value is no integer.
        KeyError: if the key is absent and there is no default.
    """
    return _read(source, key, default, is_nullable, (int,), "an integer")


def read_num_layers(source: Mapping[str, Any], key: str) -> int:
    """Returns the number of layers, which must be at most `MAX_LAYERS`; otherwise like `read_integer`."""
    return check_integer(f"config.json: {key}", read_integer(source, key), 1, MAX_LAYERS)


def read_number(source: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, is_nullable: bool = False) -> Any:
    """Returns the finite number of a key as a float; arguments and errors are those of `read_integer`."""
    value = _read(source, key, default, is_nullable, (int, float), "a number")
    if value is not None and not math.isfinite(value):
        raise ValueError(f"config.json: {key}={value!r}: expected a finite number")
    return None if value is None else float(value)


def read_flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    """Returns the boolean value of a key; arguments and errors are those of `read_integer`."""
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
        if default is None:
            return None
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"config.json: {key}={value!r}: expected {expected}")
    return value


def read_interval(source: Mapping[str, Any], key: str, default: int, num_layers: int) -> list[bool]:
    """Returns for each layer whether its number, from 1 on, is no multiple of the interval of a key.

    Raises:
        ValueError: if the interval is 0 or no integer.
    """
    interval = read_integer(source, key, default)
    if interval == 0:
        raise ValueError(f"config.json: {key}=0: expected another integer")
    return [(i + 1) % interval != 0 for i in range(num_layers)]


def read_layer_types(source: Mapping[str, Any], num_layers: int, kinds: tuple[str, ...]) -> list[str] | None:
    """Returns ``layer_types``, None if there are none.

    Raises:
        ValueError: if they are no list with one of `kinds` per layer.
    """
    types = source.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in kinds for kind in types):
        raise ValueError(f"config.json: layer_types={types!r}: expected a list of {num_layers} of {kinds}")
    return types


def read_activation(source: Mapping[str, Any], key: str, default: str) -> Any:
    """Returns our name of an activation.

    Raises:
        ValueError: if the activation is unknown.
    """
    name = source.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"config.json: {key}={name!r}: expected one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def require_values(source: Mapping[str, Any], **supported: Any) -> None:
    """Checks keys of which the decoder supports one value only, given as keyword arguments; absent keys have it.

    Raises:
        ValueError: naming the first key with another value.
    """
    for key, only in supported.items():
        if source.get(key, only) != only:
            raise ValueError(f"config.json: {key}={source[key]!r}: expected {only!r}")


def check_common(source: Mapping[str, Any]) -> None:
    """Checks keys that configurations of all families can have.

    Raises:
        ValueError: naming a key with a value that the decoder does not support.
    """
    quantization = source.get("quantization_config")
    if isinstance(quantization, Mapping):
        if quantization.get("quant_method") == "fp8":
            check_fp8(quantization)
        elif source.get("model_type") == "gpt_oss":
            require_values(quantization, quant_method="mxfp4")
        else:
            require_values(quantization, quant_method="fp8")
    else:
        require_values(source, quantization_config=None)
    require_values(source, is_causal=True, add_cross_attention=False)


def read_text_part(source: Mapping[str, Any], family: str, *, is_tied: bool) -> Mapping[str, Any]:
    """Returns the configuration of the text model of a model that also sees images.

    Args:
        source: the Hugging Face configuration.
        family: of the text model.
        is_tied: default of its ``tie_word_embeddings``, which that of `source` must equal.

    Raises:
        ValueError: if there is none, or a key has a value that the decoder does not support.
    """
    text = source.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config={text!r}: expected a dictionary")
    check_common(text)
    require_values(text, model_type=family)
    require_values(source, tie_word_embeddings=text.get("tie_word_embeddings", is_tied))
    return text


def check_fp8(quantization: Mapping[str, Any]) -> None:
    """Checks a ``quantization_config`` of weights in FP8 with a scale per block (DeepSeek-V3).

    Raises:
        ValueError: naming a key with another value.
    """
    require_values(quantization, fmt="e4m3")
    size = quantization.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        raise ValueError(f"config.json: weight_block_size={size!r}: expected two positive integers")


def check_aliases(source: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
    """Checks that a second name of a key, if present, has the same value as the key.

    `transformers` reads both names into one attribute, and its value depends on their order.

    Args:
        source: the Hugging Face configuration.
        aliases: second name → key.

    Raises:
        ValueError: naming both keys if their values differ.
    """
    for alias, key in aliases.items():
        if alias in source and source[alias] != source.get(key):
            raise ValueError(
                f"config.json: {alias}={source[alias]!r} and {key}={source.get(key)!r}: expected only {key}"
            )
