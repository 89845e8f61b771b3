"""The attention part of a layer."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bass_jax.models import rotary
from bass_jax.models.kv_cache import Int8KV, PagedKV, append
from bass_jax.models.mesh import has_axis
from bass_jax.models.model_config import AttentionConfig, ModelConfig
from bass_jax.models.norm import apply_norm, declare_norm, project
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.weights import Weight, declare_weight, multiply
from kernels_pallas import ops
from kernels_pallas.attention.causal import causal_attention


class Attention(nn.Module):
    """Grouped-query attention over a row's own cached prefix.

    Attributes:
        config: of the model.
        attention: of the layer.
    """

    config: ModelConfig
    attention: AttentionConfig

    @nn.compact
    def __call__(self, x, positions, angles, keys, values, num_candidates=1):
        """Returns the attention's output ``[B, T, D]`` and the layer's cache with the new tokens in it.

        `x` is a `Normed` input; `angles` is None for a model without rotary positions. With `num_candidates` the tokens
        are that many chains, one after the other, that follow the same prefix: the cache is left with the last one's
        tokens in it, and the new keys and values of all, ``[B, T, K, H]``, are returned behind it.
        """
        config, attention = self.config, self.attention
        K, R, H, D = attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim, config.width
        qkv = declare_weight(self, "qkv", (D, K, R + 2, H), ("embed", "kv_heads", None, None))
        projected = project(x, qkv, rounds_to=config.rounds_to)
        if attention.has_bias:
            projected += declare(self, "qkv_bias", (K, R + 2, H), ("kv_heads", None, None), zeros)
        scored = projected[:, :, :, : R + 1]
        if (norm := attention.qk_norm) is not None:
            query_norm, key_norm = (declare_norm(self, f"{name}_norm", norm, H, None) for name in ("query", "key"))
            queries, new_keys = scored[:, :, :, :R], scored[:, :, :, R:]
            normed = apply_norm(norm, queries, query_norm), apply_norm(norm, new_keys, key_norm)
            scored = jnp.concatenate(normed, axis=3)
        if angles is not None:
            scored = rotary.rotate(scored, *angles)
        new_keys, new_values = scored[:, :, :, R], projected[:, :, :, R + 1]
        is_whole = keys is None
        if is_whole:  # Whole sequences, of which nothing was read before.
            keys, values = new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2)
        B, T = positions.shape
        queries = scored[:, :, :, :R].reshape(B, T, K * R, H)
        parts = []
        # Chains take turns in the same slots: each attends as if it were alone, and the weights are read once for all.
        for part in range(num_candidates):
            candidate = slice(part * T // num_candidates, (part + 1) * T // num_candidates)
            new = None if is_whole else (new_keys[:, candidate], new_values[:, candidate])
            attended, keys, values = _write_and_attend(
                config, attention, queries[:, candidate], new, keys, values, positions[:, candidate]
            )
            parts.append(attended)
        attended = parts[0] if num_candidates == 1 else jnp.concatenate(parts, axis=1)
        out = declare_weight(self, "out", (K, R, H, D), ("kv_heads", None, None, "embed"))
        # One contracted axis: XLA's CPU product over three is ten times slower.
        flat = Weight(out.values.reshape(K * R * H, D), out.scale)
        attended = attended.reshape(B, T, K * R * H)
        y = multiply(attended, flat, rounds_to=config.rounds_to).astype(attended.dtype)
        if attention.has_out_bias:
            y += declare(self, "out_bias", (D,), ("embed",), zeros)
        return (y, keys, values) if num_candidates == 1 else (y, keys, values, new_keys, new_values)


def _write_and_attend(config: ModelConfig, attention: AttentionConfig, queries, new, keys, values, positions):
    """Appends a chain's keys and values, if they are not there yet, and scores the cache for its queries.

    On a mesh every device does so for its own heads: a kernel is not XLA's to split.

    Args:
        config: of the model.
        attention: of the layer.
        queries: ``[B, T, N, H]``.
        new: keys and values to append, ``[B, T, K, H]``; None where `keys` and `values` are those of whole sequences.
        keys: of the cache, ``[B, K, S, H]``.
        values: of the cache.
        positions: ``[B, T]``.

    Returns:
        ``(attended, keys, values)``.
    """

    def run(queries, new, keys, values, positions):
        if new is None:
            options = {"window": attention.window, "scale": attention.scale, "soft_cap": attention.softcap}
            attended = causal_attention(queries, keys, values, **options)
            return attended, keys, values
        keys, values = append(keys, new[0], positions), append(values, new[1], positions)
        return _attend(config, attention, queries, keys, values, positions), keys, values

    axis = config.tensor_axis
    if not has_axis(axis):
        return run(queries, new, keys, values, positions)
    of_tokens, of_cache = PartitionSpec(None, None, axis), PartitionSpec(None, axis)
    spread = jax.shard_map(
        run, in_specs=(of_tokens, of_tokens, of_cache, of_cache, PartitionSpec()),
        out_specs=(of_tokens, of_cache, of_cache), check_vma=False,
    )  # fmt: skip
    return spread(queries, new, keys, values, positions)


def _attend(config: ModelConfig, attention: AttentionConfig, queries, keys, values, positions):
    """Scores the cache for one chain's queries ``[B, T, N, H]``."""
    num_queries = (positions < keys.shape[2]).sum(axis=1, dtype=jnp.int32)
    lengths = jnp.where(num_queries > 0, positions[:, 0], 0)
    layout = {"is_cache_finite": True}
    if isinstance(keys, Int8KV):
        layout |= {"k_scale": keys.scales, "v_scale": values.scales}
        keys, values = keys.values, values.values
    elif isinstance(keys, PagedKV):  # Of what others left in a page nothing is known.
        layout = {"tables": keys.tables}
        keys, values = keys.pages, values.pages
    attend = functools.partial(
        ops.ragged_attention,
        queries,
        keys,
        values,
        lengths,
        num_queries=num_queries,
        window=attention.window,
        scale=attention.scale,
        soft_cap=attention.softcap,
        **layout,
    )
    implementation = config.attention_implementation
    if implementation in ("pad", "split"):
        return attend(form=implementation)
    return attend(implementation="xla" if implementation == "xla" else None)
