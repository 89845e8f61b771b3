"""One decoder for every family, in Flax Linen.

Every tensor is declared once, with its shape, its initialiser and its logical axes. Two layouts are
chosen for speed and for sharding alike:

* ``qkv [D, K, R + 2, H]``: the R query heads of a key-value head, then its key, then its value. One
  product per layer instead of three (on a two-core CPU a five-token pass falls from 31 ms to 18 ms), and
  sharding K keeps a group on one device.
* ``embedding [E, V]``: the layout that the head's product wants, so that a tied model stores it once and
  no pass transposes it. Looking a token up reads a column.
"""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from bass_jax.cache import KVCache, append
from bass_jax.config import ModelConfig
from bass_jax.models import rotary
from bass_jax.typing import Array, Float, Int
from kernels_pallas import ops

LOGICAL_AXES = ("embed", "kv_heads", "mlp", "vocab")
"""Axes that a mesh may shard; see `bass_jax.models.sharding`."""


def _tensor(module: nn.Module, name: str, shape: Sequence[int], axes: Sequence[str | None], initializer=None):
    """Declares a parameter with its logical axes."""
    initializer = initializer or nn.initializers.normal(0.02)
    dtype = jnp.dtype(module.config.dtype)  # type: ignore[attr-defined]
    boxed = nn.with_logical_partitioning(initializer, tuple(axes))
    return module.param(name, boxed, tuple(shape), dtype)


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Divides by the root mean square, in float32, and returns `x`'s dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed.astype(x.dtype) * scale).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over a row's own cached prefix."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions, angles, keys, values):
        """Returns the attention's output ``[B, T, D]`` and the layer's cache with the new tokens in it."""
        config = self.config
        K, R, H, D = config.num_kv_heads, config.queries_per_kv_head, config.head_dim, config.width
        qkv = _tensor(self, "qkv", (D, K, R + 2, H), ("embed", "kv_heads", None, None))
        projected = jnp.einsum("btd,dkrh->btkrh", x, qkv)
        if config.has_attention_bias:
            projected += _tensor(self, "qkv_bias", (K, R + 2, H), ("kv_heads", None, None), nn.initializers.zeros)
        rotated = rotary.rotate(projected[:, :, :, : R + 1], *angles)
        new_keys, new_values = rotated[:, :, :, R], projected[:, :, :, R + 1]
        if keys is None:  # A whole sequence, of which nothing was read before.
            keys, values = new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2)
        else:
            keys, values = append(keys, new_keys, positions), append(values, new_values, positions)

        is_real = positions < keys.shape[2]
        num_queries = is_real.sum(axis=1, dtype=jnp.int32)
        lengths = jnp.where(num_queries > 0, positions[:, 0], 0)
        B, T = positions.shape
        kernel = {"implementation": "xla"} if config.attention == "xla" else {"form": config.attention}
        attended = ops.ragged_attention(
            rotated[:, :, :, :R].reshape(B, T, K * R, H), keys, values, lengths,
            num_queries=num_queries, is_cache_finite=True, **kernel,
        )  # fmt: skip
        out = _tensor(self, "out", (K, R, H, D), ("kv_heads", None, None, "embed"))
        y = jnp.einsum("btkrh,krhd->btd", attended.reshape(B, T, K, R, H), out)
        if config.has_attention_bias:
            y += _tensor(self, "out_bias", (D,), ("embed",), nn.initializers.zeros)
        return y, keys, values


class GatedMlp(nn.Module):
    """``down(silu(gate x) * up x)`` with gate and up in one product."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        """Returns ``[B, T, D]``."""
        config = self.config
        D, F = config.width, config.mlp_width
        gate_up = _tensor(self, "gate_up", (D, 2, F), ("embed", None, "mlp"))
        both = jnp.einsum("btd,dgf->btgf", x, gate_up)
        if config.has_mlp_bias:
            both += _tensor(self, "gate_up_bias", (2, F), (None, "mlp"), nn.initializers.zeros)
        down = _tensor(self, "down", (F, D), ("mlp", "embed"))
        y = jnp.einsum("btf,fd->btd", nn.silu(both[:, :, 0]) * both[:, :, 1], down)
        if config.has_mlp_bias:
            y += _tensor(self, "down_bias", (D,), ("embed",), nn.initializers.zeros)
        return y


class Layer(nn.Module):
    """Pre-norm residual block."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions, angles, keys, values):
        """Returns the new residual stream and the layer's cache."""
        config = self.config
        ones = nn.initializers.ones
        scale = _tensor(self, "attention_norm", (config.width,), ("embed",), ones)
        normed = rms_norm(x, scale, config.norm_eps)
        y, keys, values = Attention(config, name="attention")(normed, positions, angles, keys, values)
        x = x + y
        scale = _tensor(self, "mlp_norm", (config.width,), ("embed",), ones)
        return x + GatedMlp(config, name="mlp")(rms_norm(x, scale, config.norm_eps)), keys, values


class Decoder(nn.Module):
    """Embedding, layers, norm and head.

    Layers are unrolled, not scanned: a scan that returns its cache copies it, and a scan that carries it
    hides each layer's buffer from in-place kernels.
    """

    config: ModelConfig

    def setup(self):
        """Declares the tensors outside the layers, and the layers."""
        config = self.config
        E = config.embedding_width or config.width
        self.embedding = _tensor(self, "embedding", (E, config.vocab_size), ("embed", "vocab"))
        if config.embedding_width is not None:
            self.embedding_projection = _tensor(self, "embedding_projection", (E, config.width), (None, "embed"))
        self.layers = [Layer(config, name=f"layer_{i}") for i in range(config.num_layers)]
        self.final_norm = _tensor(self, "final_norm", (config.width,), ("embed",), nn.initializers.ones)
        if not config.is_tied:
            O = config.output_vocab_size or config.vocab_size  # noqa: E741
            self.head = _tensor(self, "head", (config.width, O), ("embed", "vocab"))

    def features(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Runs embedding, layers and final norm; prefill needs no more than this.

        Without a cache, the tokens are whole sequences from position 0 on, and nothing is scattered: the
        pass to differentiate.
        """
        config = self.config
        # Out-of-range ids (padding of -1) read column 0 and are never used.
        columns = jnp.clip(tokens, 0, config.vocab_size - 1)
        x = jnp.moveaxis(jnp.take(self.embedding, columns, axis=1), 0, -1)
        if config.embedding_width is not None:
            x = jnp.einsum("bte,ed->btd", x, self.embedding_projection)
        angles = rotary.angles(positions, rotary.frequencies(config))
        keys, values = [], []
        nothing = (None,) * config.num_layers
        cached = (nothing, nothing) if cache is None else (cache.keys, cache.values)
        for layer, k, v in zip(self.layers, *cached, strict=True):
            x, k, v = layer(x, positions, angles, k, v)
            keys.append(k)
            values.append(v)
        return rms_norm(x, self.final_norm, config.norm_eps), KVCache(tuple(keys), tuple(values))

    def logits(self, features: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Scores the vocabulary, float32."""
        head = self.embedding if self.config.is_tied else self.head
        return jnp.einsum("btd,do->bto", features, head, preferred_element_type=jnp.float32)

    def __call__(self, tokens, positions, cache):
        """Returns logits ``[B, T, O]`` float32 and the cache with the new tokens in it."""
        features, cache = self.features(tokens, positions, cache)
        return self.logits(features), cache


@functools.cache
def decoder(config: ModelConfig) -> Decoder:
    """Returns the one module of a configuration (a module is immutable; building it costs 100 µs)."""
    return Decoder(config)
