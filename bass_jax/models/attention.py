"""The attention of a layer."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bass_jax.models import rotary
from bass_jax.models.kv_cache import Int8KV, LayerKV, PagedKV, append
from bass_jax.models.mesh import has_axis
from bass_jax.models.model_config import AttentionConfig, ModelConfig
from bass_jax.models.norm import Normed, apply_norm, declare_norm, project, rms_norm
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.weights import Weight, declare_weight, multiply
from bass_jax.typing import Array
from kernels_pallas import ops
from kernels_pallas.attention.causal import causal_attention


class LayerOutput(NamedTuple):
    """What the attention of a layer and the layer itself return."""

    x: Array  # [B, T, D]: the attention's output, or the layer's residual stream
    keys: Any  # the layer's cache with the tokens of this pass, or [B, K, T, H] without a cache; or a `PendingState`
    values: LayerKV
    new_keys: Array  # [B, T, K, H], of the tokens of this pass; None in a recurrent layer
    new_values: Array  # [B, T, K, H]


class Projections(NamedTuple):
    """What attention makes of its input."""

    queries: Array  # [B, T, N, H], rotated
    keys: Array  # [B, T, K, H], rotated
    values: Array  # [B, T, K, H]
    gates: Array | None  # [B, T, N, H], of the output, before the sigmoid


class Attention(nn.Module):
    """Grouped-query attention over a row's own cached prefix.

    Attributes:
        config: of the model.
        attention: of the layer.
    """

    config: ModelConfig
    attention: AttentionConfig

    @nn.compact
    def __call__(self, x, positions, angles, keys, values, num_candidates=1) -> LayerOutput:
        """Attends from the tokens of this pass, and writes their keys and values to the cache.

        Args:
            x: a `Normed` input, ``[B, T, D]``.
            positions: ``[B, T]`` int32.
            angles: cosines and sines of the positions; None for a layer without rotary positions.
            keys: the layer's cache; None if the tokens are whole sequences.
            values: likewise.
            num_candidates: the tokens of a row are this many candidate drafts, one after the other, which follow the
                same prefix and are written to the same slots. The cache then holds the tokens of the last one.
        """
        config, attention = self.config, self.attention
        queries, new_keys, new_values, gates = self._project(x, angles)
        if attention.temperature_scale is not None:
            queries = _scale_by_position(attention, queries, positions)
        sinks = None
        if attention.has_sinks:
            shape = attention.num_kv_heads, attention.queries_per_kv_head
            sinks = declare(self, "sinks", shape, ("kv_heads", None), zeros)
        attended, keys, values = write_and_attend(
            config, attention, queries, (new_keys, new_values), keys, values, positions, sinks, num_candidates
        )
        if gates is not None:
            attended *= jax.nn.sigmoid(gates)
        return LayerOutput(self._output(attended), keys, values, new_keys, new_values)

    def _project(self, x: Normed, angles: tuple | None, *, has_queries: bool = True) -> Projections:
        """Projects the input. Without queries their weights are not read, and the result has no heads of queries."""
        config, attention = self.config, self.attention
        K, R, H = attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim
        rows = 2 * R + 2 if attention.has_output_gate else R + 2
        # The input may be wider than the output, as in the first layer of an EAGLE-3 head.
        qkv = declare_weight(self, "qkv", (K, rows, H, x.values.shape[-1]), ("kv_heads", None, None, "embed"))
        bias = declare(self, "qkv_bias", (K, rows, H), ("kv_heads", None, None), zeros) if attention.has_bias else None
        if not has_queries:
            used = slice(R, R + 2)
            qkv = Weight(qkv.values[:, used], None if qkv.scale is None else qkv.scale[:, used])
            bias = None if bias is None else bias[:, used]
            R = 0
        projected = project(x, qkv, rounds_to=config.rounds_to)
        if bias is not None:
            projected += bias
        queries_and_keys = projected[:, :, :, : R + 1]
        if attention.qk_norm is not None and attention.qk_norm_span != "rotated_head":
            queries, new_keys = queries_and_keys[:, :, :, :R], queries_and_keys[:, :, :, R:]
            parts = ("query_norm", queries), ("key_norm", new_keys)
            normed = [self._norm_heads(name, part) for name, part in parts if part.shape[3]]
            queries_and_keys = jnp.concatenate(normed, axis=3)
        if angles is not None:
            queries_and_keys = rotary.rotate(queries_and_keys, *angles)
        if attention.qk_norm is not None and attention.qk_norm_span == "rotated_head":
            queries_and_keys = rms_norm(queries_and_keys, jnp.ones((H,), x.values.dtype), attention.qk_norm.eps)
        heads = *projected.shape[:2], K * R, H
        queries, gates = queries_and_keys[:, :, :, :R].reshape(heads), projected[:, :, :, R + 2 :]
        gates = gates.reshape(heads) if attention.has_output_gate and R else None
        return Projections(queries, queries_and_keys[:, :, :, R], projected[:, :, :, R + 1], gates)

    def _output(self, attended: Array) -> Array:
        """Projects the attended values ``[B, T, N, H]`` to the width of the residual stream."""
        config, attention = self.config, self.attention
        K, R, H, D = attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim, config.width
        out = declare_weight(self, "out", (D, K, R, H), ("embed", "kv_heads", None, None))
        out = Weight(out.values.reshape(D, K * R * H), out.scale)
        attended = attended.reshape(*attended.shape[:2], K * R * H)
        y = multiply(attended, out, rounds_to=config.rounds_to).astype(attended.dtype)
        if attention.has_out_bias:
            y += declare(self, "out_bias", (D,), ("embed",), zeros)
        return y

    def _norm_heads(self, name: str, x: Array) -> Array:
        """Normalizes queries ``[B, T, K, R, H]`` or keys ``[B, T, K, 1, H]``; see `AttentionConfig.qk_norm_span`."""
        norm, span = self.attention.qk_norm, self.attention.qk_norm_span
        assert norm is not None
        shape = x.shape[2:] if span == "each_head" else (x.shape[-1],)
        rows = x
        if span == "all_heads":
            rows = x.reshape(*x.shape[:2], -1)
            shape = rows.shape[2:]
        return apply_norm(norm, rows, declare_norm(self, name, norm, *shape, axis=None)).reshape(x.shape)


def _scale_by_position(attention: AttentionConfig, queries: Array, positions: Array) -> Array:
    """Multiplies queries ``[B, T, N, H]`` by their factors; see `AttentionConfig.temperature_scale`."""
    assert attention.temperature_scale is not None
    steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / attention.temperature_step)
    factors = 1.0 + attention.temperature_scale * jnp.log1p(steps)
    return (queries * factors[:, :, None, None]).astype(queries.dtype)


def write_and_attend(
    config: ModelConfig,
    attention: AttentionConfig,
    queries: Array,
    new: tuple[Array, Array],
    keys: LayerKV | None,
    values: LayerKV | None,
    positions: Array,
    sinks: Array | None,
    num_candidates: int,
) -> tuple[Array, Any, Any]:
    """Writes the new keys and values of all candidates to the cache, and attends to it.

    Args:
        config: of the model.
        attention: of the layer.
        queries: ``[B, T, N, H]``.
        new: keys and values, ``[B, T, K, H]`` each; the values of latent attention are ``[B, T, 1, 0]``.
        keys: of the cache; None if the tokens are whole sequences.
        values: likewise.
        positions: ``[B, T]``.
        sinks: ``[K, R]``, or None.
        num_candidates: number of candidate drafts in T; see `Attention`.

    Returns:
        ``(attended [B, T, N, H], keys, values)``, of latent attention with the rotated lanes.
    """
    new_keys, new_values = new
    T, is_whole = positions.shape[1], keys is None
    if is_whole:
        keys, values = new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2)
    parts = []
    # Each candidate attends as if it were the only one; the weights are read once for all.
    for candidate in range(num_candidates):
        own = slice(candidate * T // num_candidates, (candidate + 1) * T // num_candidates)
        of_candidate = None if is_whole else (new_keys[:, own], new_values[:, own])
        part, keys, values = _write_and_attend(
            config, attention, queries[:, own], of_candidate, keys, values, positions[:, own], sinks
        )
        parts.append(part)
    return parts[0] if num_candidates == 1 else jnp.concatenate(parts, axis=1), keys, values


def _write_and_attend(config: ModelConfig, attention: AttentionConfig, queries, new, keys, values, positions, sinks):
    """Writes new keys and values to the cache, and attends to it. On a mesh every device does so for its own heads.

    Args:
        config: of the model.
        attention: of the layer.
        queries: ``[B, T, N, H]``.
        new: keys and values to write, ``[B, T, K, H]`` each; None if `keys` and `values` are whole sequences.
        keys: of the cache, ``[B, K, S, H]``.
        values: likewise.
        positions: ``[B, T]``.
        sinks: ``[K, R]``, or None.

    Returns:
        ``(attended [B, T, N, H], keys, values)``.
    """
    is_latent = attention.latent is not None

    def run(queries, new, keys, values, positions, sinks):
        if new is None and sinks is None:
            attended = causal_attention(
                queries,
                keys,
                keys if is_latent else values,
                window=attention.window,
                chunk=attention.chunk,
                scale=attention.scale,
                soft_cap=attention.softcap,
            )
            return attended, keys, values
        if new is not None:
            keys, values = append(keys, new[0], positions), append(values, new[1], positions)
        read = keys if is_latent else values
        return _attend(config, attention, queries, keys, read, positions, sinks), keys, values

    axis = config.tensor_axis
    if not has_axis(axis):
        return run(queries, new, keys, values, positions, sinks)
    of_tokens, of_cache = PartitionSpec(None, None, axis), PartitionSpec(None, axis)
    of_new = of_tokens
    if is_latent:  # Every device holds the only key-value head.
        of_new = of_cache = PartitionSpec()
    if isinstance(keys, PagedKV):
        of_cache = PagedKV(of_cache, tables=PartitionSpec())  # type: ignore[arg-type]
    # Explicit, because XLA cannot partition a kernel.
    per_device = jax.shard_map(
        run,
        in_specs=(of_tokens, of_new, of_cache, of_cache, PartitionSpec(), PartitionSpec(axis)),
        out_specs=(of_tokens, of_cache, of_cache),
        check_vma=False,
    )
    return per_device(queries, new, keys, values, positions, sinks)


def _attend(config: ModelConfig, attention: AttentionConfig, queries, keys: Any, values: Any, positions, sinks):
    """Attends from queries ``[B, T, N, H]`` to the cache, or to whole sequences that start at position 0."""
    num_queries = (positions < keys.shape[2]).sum(axis=1, dtype=jnp.int32)
    num_cached = jnp.where(num_queries > 0, positions[:, 0], 0)  # before this pass; one less than committed tokens
    layout: dict[str, Any] = {"is_cache_finite": True}
    if isinstance(keys, PagedKV):
        # A page may contain anything that another row left there, so it is not assumed to be finite.
        layout = {"tables": keys.tables}
        keys, values = keys.pages, values.pages
    if isinstance(keys, Int8KV):
        layout |= {"k_scale": keys.scales, "v_scale": values.scales}
        keys, values = keys.values, values.values
    if config.attention_implementation == "xla":
        layout["implementation"] = "xla"
    else:
        layout["form"] = config.attention_implementation
    return ops.ragged_attention(
        queries,
        keys,
        values,
        num_cached,
        num_queries=num_queries,
        window=attention.window,
        chunk=attention.chunk,
        scale=attention.scale,
        soft_cap=attention.softcap,
        sinks=None if sinks is None else sinks.reshape(-1),
        **layout,
    )
