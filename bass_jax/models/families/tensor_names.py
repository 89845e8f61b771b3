"""Rules that several families share: how tensors are fused and ordered.

Weights are ``[out, in]``, as in torch. GPT-2 stores ``[in, out]``, for which ``is_in_first`` is True.
"""

from collections.abc import Callable

import numpy as np

from bass_jax.models.families.base import Rule
from bass_jax.models.families.tensor_layout import empty
from bass_jax.models.model_config import AttentionConfig, DenseMLP, NormConfig

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Queries, keys and values, each ``[heads * H, ...]``."""


def same(name: str) -> Rule:
    """Returns a rule that copies a tensor."""
    return Rule((name,), lambda x: x, lambda x: (x,))


def transposed(name: str) -> Rule:
    """Returns a rule that transposes a matrix."""
    return Rule((name,), np.transpose, lambda x: (np.transpose(x),))


def norm(config: NormConfig, ours: str, theirs: str) -> dict[str, Rule]:
    """Returns the rules of a norm: its scale, and its bias if it has one."""
    rules = {ours: same(f"{theirs}.weight")}
    return rules | {f"{ours}_bias": same(f"{theirs}.bias")} if config.kind == "layer" else rules


def attention_out(config: AttentionConfig, theirs: str, width: int, *, is_in_first: bool = False) -> dict[str, Rule]:
    """Returns the rules of the output projection ``[D, K, R, H]`` and its bias, without their path."""
    K, R, H = config.num_kv_heads, config.queries_per_kv_head, config.head_dim

    def build(weight):
        return (weight.T if is_in_first else weight).reshape(width, K, R, H)

    def split(out):
        out = out.reshape(width, K * R * H)
        return (out.T if is_in_first else out,)

    rules = {"out": Rule((f"{theirs}.weight",), build, split)}
    return rules | {"out_bias": same(f"{theirs}.bias")} if config.has_out_bias else rules


def qkv(config: AttentionConfig, names: tuple[str, str, str], suffix: str) -> Rule:
    """Returns a rule that fuses three tensors to weights ``[K, R + 2, H, D]`` or biases ``[K, R + 2, H]``."""
    return Rule(
        tuple(f"{name}.{suffix}" for name in names),
        lambda q, k, v: _fuse(config, (q, k, v)),
        lambda fused: _unfuse(config, fused),
    )


def fused_qkv(
    config: AttentionConfig,
    theirs: str,
    unpack: Callable[[np.ndarray], Parts],
    pack: Callable[[Parts], np.ndarray],
    *,
    is_in_first: bool = False,
) -> dict[str, Rule]:
    """Returns the rules of one stored tensor of queries, keys and values, and of its bias, without their path.

    Args:
        config: of the layer.
        theirs: stored name of the projection.
        unpack: ``[out, ...]`` → queries, keys and values.
        pack: inverts `unpack`.
        is_in_first: whether the weight is stored as ``[in, out]``.
    """

    def build(weight):
        return _fuse(config, unpack(weight.T if is_in_first and weight.ndim == 2 else weight))

    def split(fused):
        weight = pack(_unfuse(config, fused))
        return (weight.T if is_in_first and weight.ndim == 2 else weight,)

    rules = {"qkv": Rule((f"{theirs}.weight",), build, split)}
    return rules | {"qkv_bias": Rule((f"{theirs}.bias",), build, split)} if config.has_bias else rules


def stacked(config: AttentionConfig) -> tuple[Callable, Callable]:
    """Returns `unpack` and `pack` for all queries, then all keys, then all values."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim

    def unpack(weight):
        q, k, v, rest = np.split(weight, [N * H, (N + K) * H, (N + 2 * K) * H])
        if len(rest):
            raise ValueError("too many rows")
        return q, k, v

    return unpack, np.concatenate


def per_head(config: AttentionConfig) -> tuple[Callable, Callable]:
    """Returns `unpack` and `pack` for the query, key and value of each head in turn, without grouping."""
    N, H = config.num_heads, config.head_dim

    def unpack(weight):
        weight = weight.reshape(N, 3, H, *weight.shape[1:])
        return tuple(weight[:, i].reshape(N * H, *weight.shape[3:]) for i in range(3))

    def pack(parts):
        heads = [part.reshape(N, H, *part.shape[1:]) for part in parts]
        return np.stack(heads, axis=1).reshape(3 * N * H, *parts[0].shape[1:])

    return unpack, pack


def gated_mlp(config: DenseMLP, theirs: str) -> dict[str, Rule]:
    """Returns the rules of ``gate_proj``, ``up_proj`` and ``down_proj``, without their path."""
    names = (f"{theirs}.gate_proj", f"{theirs}.up_proj")
    rules = {"gate_up": _gate_up(names, "weight"), "down": same(f"{theirs}.down_proj.weight")}
    if config.has_bias:
        rules |= {"gate_up_bias": _gate_up(names, "bias"), "down_bias": same(f"{theirs}.down_proj.bias")}
    return rules


def plain_mlp(config: DenseMLP, up: str, down: str, *, is_in_first: bool = False) -> dict[str, Rule]:
    """Returns the rules of an MLP without a gate, without their path."""
    matrix = transposed if is_in_first else same
    rules = {"up": matrix(f"{up}.weight"), "down": matrix(f"{down}.weight")}
    if config.has_bias:
        rules |= {"up_bias": same(f"{up}.bias"), "down_bias": same(f"{down}.bias")}
    return rules


def under(path: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Adds a path in front of the names of `rules`."""
    return {f"{path}/{name}": rule for name, rule in rules.items()}


def _fuse(config: AttentionConfig, parts: Parts) -> np.ndarray:
    K, R, H = config.num_kv_heads, config.queries_per_kv_head, config.head_dim
    # Weights are [out, in] and biases [out], where out is (kv head, query of the group, lane).
    grouped = [part.reshape(K, -1, H, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1, out=empty((K, R + 2, H, *parts[0].shape[1:]), parts[0].dtype))


def _unfuse(config: AttentionConfig, fused: np.ndarray) -> Parts:
    R = config.queries_per_kv_head
    q, k, v = (part.reshape(-1, *part.shape[3:]) for part in np.split(fused, [R, R + 1], axis=1))
    return q, k, v


def _gate_up(names: tuple[str, str], suffix: str) -> Rule:
    def build(gate, up):
        return np.stack((gate, up), out=empty((2, *gate.shape), gate.dtype))

    return Rule(tuple(f"{name}.{suffix}" for name in names), build, tuple)
