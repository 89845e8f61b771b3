"""Rules that several families share: how tensors are fused and ordered.

Weights are ``[out, in]``, as in torch. GPT-2 stores ``[in, out]``, for which ``is_in_first`` is True.
"""

from collections.abc import Callable

import numpy as np

from bass_jax.models.families.base import Rule
from bass_jax.models.families.tensor_layout import empty
from bass_jax.models.model_config import AttentionConfig, DenseMLP, MoEConfig, NormConfig

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Queries, keys and values, each ``[heads * H, ...]``."""


def same(name: str) -> Rule:
    """Returns a rule that copies a tensor."""
    return Rule((name,), lambda x: x, lambda x: (x,))


def transposed(name: str) -> Rule:
    """Returns a rule that transposes a matrix."""
    return Rule((name,), np.transpose, lambda x: (np.transpose(x),))


def reshaped(name: str, shape: tuple[int, ...], num_axes: int) -> Rule:
    """Returns a rule that reshapes a tensor whose first axis is ours without the last ``num_axes - 1``."""

    def split(x):
        return (x.reshape(-1, *shape[len(shape) - num_axes + 1 :]),)

    return Rule((name,), lambda x: x.reshape(shape), split)


def norm(config: NormConfig, ours: str, theirs: str) -> dict[str, Rule]:
    """Returns the rules of a norm: its scale, and its bias if it has one."""
    rules = {ours: same(f"{theirs}.weight")}
    has_bias = config.kind == "layer" and config.has_bias
    return rules | {f"{ours}_bias": same(f"{theirs}.bias")} if has_bias else rules


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


def _check_dense(config: DenseMLP | MoEConfig) -> DenseMLP:
    if not isinstance(config, DenseMLP):
        raise ValueError(f"mlp={config!r}: expected a DenseMLP, because the family has no experts")
    return config


def gated_mlp(config: DenseMLP | MoEConfig, theirs: str) -> dict[str, Rule]:
    """Returns the rules of ``gate_proj``, ``up_proj`` and ``down_proj``, without their path."""
    config = _check_dense(config)
    names = (f"{theirs}.gate_proj", f"{theirs}.up_proj")
    rules = {"gate_up": _gate_up(names, "weight"), "down": same(f"{theirs}.down_proj.weight")}
    if config.has_bias:
        rules |= {"gate_up_bias": _gate_up(names, "bias"), "down_bias": same(f"{theirs}.down_proj.bias")}
    return rules


def fused_gate_up_mlp(config: DenseMLP, theirs: str) -> dict[str, Rule]:
    """Returns the rules of ``gate_up_proj``, first the gate, and of ``down_proj``, without their path."""

    def build(weight):
        return weight.reshape(2, config.width, -1)

    gate_up = Rule((f"{theirs}.gate_up_proj.weight",), build, lambda x: (x.reshape(2 * config.width, -1),))
    return {"gate_up": gate_up, "down": same(f"{theirs}.down_proj.weight")}


def interleaved(config: AttentionConfig, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Returns the rules of an attention whose stored rotated pairs are neighboring lanes instead of two halves."""
    assert config.rope is not None or config.qk_norm is None
    H = config.head_dim
    lanes = (config.rope.rotary_dim or H) if config.rope is not None else 0
    halves = [*range(0, lanes, 2), *range(1, lanes, 2), *range(lanes, H)]

    def reorder(x, order, name):
        if not name.startswith("qkv"):
            return np.ascontiguousarray(x[..., order])  # the scales of a norm
        R = config.queries_per_kv_head
        ordered = x.copy()
        ordered[:, : R + 1] = x[:, : R + 1, order]
        return ordered

    def wrap(name, rule):
        return Rule(
            rule.sources,
            lambda *parts: reorder(rule.build(*parts), halves, name),
            lambda x: rule.split(reorder(x, np.argsort(halves), name)),
        )

    reordered = ("qkv", "qkv_bias", "query_norm", "key_norm")
    return {name: wrap(name, rule) if name in reordered else rule for name, rule in rules.items()}


def plain_mlp(config: DenseMLP | MoEConfig, up: str, down: str, *, is_in_first: bool = False) -> dict[str, Rule]:
    """Returns the rules of an MLP without a gate, without their path."""
    config = _check_dense(config)
    matrix = transposed if is_in_first else same
    rules = {"up": matrix(f"{up}.weight"), "down": matrix(f"{down}.weight")}
    if config.has_bias:
        rules |= {"up_bias": same(f"{up}.bias"), "down_bias": same(f"{down}.bias")}
    return rules


def experts(
    config: MoEConfig,
    theirs: str,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
) -> dict[str, Rule]:
    """Returns the rules of a mixture of experts, without their path.

    Files hold three matrices per expert, or those of all experts in two tensors, which is how `transformers` 5 keeps
    them in memory. Both are read; the first is written.

    Args:
        config: of the layer.
        theirs: stored name of the layer's experts and router.
        parts: stored names of an expert's matrices: of the gate, of the multiplied projection, and of the last one.
        shared: stored name of the shared MLP.
    """
    gate, up, down = ([f"{theirs}.experts.{i}.{part}.weight" for i in range(config.num_experts)] for part in parts)

    def build(*matrices):
        pairs = (len(matrices) // config.num_experts,) if len(matrices) > config.num_experts else ()
        shape = (config.num_experts, *pairs, *matrices[0].shape)
        return np.stack(matrices, out=empty((len(matrices), *matrices[0].shape), matrices[0].dtype)).reshape(shape)

    def split(stacked):
        return tuple(stacked.reshape(-1, *stacked.shape[-2:]))

    def unfuse(fused):
        return fused.reshape(config.num_experts, 2, config.width, -1)

    def fuse(stacked):
        return (stacked.reshape(config.num_experts, 2 * config.width, -1),)

    pairs = tuple(name for pair in zip(gate, up, strict=True) for name in pair)
    rules = {
        "router": same(f"{theirs}.gate.weight"),
        "experts_gate_up": Rule(pairs, build, split, Rule((f"{theirs}.experts.gate_up_proj",), unfuse, fuse)),
        "experts_down": Rule(tuple(down), build, split, same(f"{theirs}.experts.down_proj")),
    }
    if config.has_choice_bias:
        rules["choice_bias"] = same(f"{theirs}.gate.e_score_correction_bias")
    if config.shared is not None:
        rules |= under("shared", gated_mlp(config.shared, f"{theirs}.{shared}"))
    if config.has_shared_gate:
        rules["shared_gate"] = same(f"{theirs}.{shared}_gate.weight")
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
