"""Experts in a Hugging Face configuration."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bass_jax.models.families.base import check_aliases, read_flag, read_integer
from bass_jax.models.model_config import DenseMLP, ModelConfig, MoEConfig


def change_mlps(config: ModelConfig, is_sparse: Callable[[int], bool], moe: MoEConfig) -> ModelConfig:
    """Returns `config` with experts in the layers whose index is sparse."""
    layers = (dataclasses.replace(layer, mlp=moe) if is_sparse(i) else layer for i, layer in enumerate(config.layers))
    return dataclasses.replace(config, layers=tuple(layers))


def check_num_experts(source: Mapping[str, Any]) -> None:
    """Checks that both names of the number of experts, if present, have the same value.

    Raises:
        ValueError: naming both if they differ.
    """
    if "num_experts" in source and "num_local_experts" in source:
        check_aliases(source, {"num_local_experts": "num_experts"})


def read_num_experts(source: Mapping[str, Any], default: int) -> int:
    """Returns the number of experts, which has two names."""
    check_num_experts(source)
    key = "num_local_experts" if "num_local_experts" in source else "num_experts"
    return read_integer(source, key, default)


def read_sparse_layers(source: Mapping[str, Any]) -> Callable[[int], bool]:
    """Returns a function that tells whether the layer of an index has experts, for the Qwen families.

    Raises:
        ValueError: if a key has an invalid value.
    """
    dense = source.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"config.json: mlp_only_layers={dense!r}: expected a list of integers")
    step = read_integer(source, "decoder_sparse_step", 1)
    if step == 0:
        raise ValueError("config.json: decoder_sparse_step=0: expected another integer")
    return lambda i: i not in dense and (i + 1) % step == 0


def read_is_normalized(source: Mapping[str, Any]) -> bool:
    """Returns whether the factors of the chosen experts are divided by their sum."""
    return read_flag(source, "norm_topk_prob", False)


def find_moe(config: ModelConfig) -> MoEConfig:
    """Returns the experts of the first layer that has some.

    Raises:
        ValueError: if no layer has experts.
    """
    for layer in config.layers:
        if isinstance(layer.mlp, MoEConfig):
            return layer.mlp
    raise ValueError("layers: expected a layer with experts")


def write_sparse_layers(config: ModelConfig) -> dict[str, Any]:
    """Inverts `read_sparse_layers`."""
    dense = [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, DenseMLP)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
