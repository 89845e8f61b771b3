"""One decoder for every family, in Flax Linen.

Every tensor is declared once, with its shape, its initializer and its logical axes. Two layouts are
chosen for speed and for sharding alike:

* ``qkv [D, K, R + 2, H]``: the R query heads of a key-value head, then its key, then its value. One
  product per layer instead of three (on a two-core CPU a five-token pass falls from 31 ms to 18 ms), and
  sharding K keeps a group on one device.
* ``embedding [E, V]``: the layout that the head's product wants, so that a tied model stores it once and
  no pass transposes it. Looking a token up reads a column.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from bass_jax.models import rotary
from bass_jax.models.attention import Attention
from bass_jax.models.kv_cache import KVCache, PagedCache, layers_of, with_layers
from bass_jax.models.mesh import replicate
from bass_jax.models.mlp import MLP
from bass_jax.models.model_config import LayerConfig, ModelConfig, NormConfig
from bass_jax.models.norm import Normed, apply_norm, declare_norm, norm_for_projections
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.weights import declare_weight, multiply, product
from bass_jax.typing import Array, Float, Int, Params


class Layer(nn.Module):
    """Attention and MLP around the residual stream, as `LayerConfig.block` says.

    Attributes:
        config: of the model.
        layer: of this layer.
    """

    config: ModelConfig
    layer: LayerConfig

    @nn.compact
    def __call__(self, x, positions, angles, keys, values, num_candidates=1):
        """Returns the new residual stream and what the attention returns behind its output."""
        config, layer = self.config, self.layer

        def normed(name, x):
            return apply_norm(layer.norm, x, declare_norm(self, name, layer.norm, config.width))

        def normed_input(name, x):
            return norm_for_projections(layer.norm, x, declare_norm(self, name, layer.norm, config.width))

        def attend(x):
            attention = Attention(config, layer.attention, name="attention")
            return attention(x, positions, angles, keys, values, num_candidates)

        mlp = MLP(config, layer.mlp, name="mlp")
        if layer.block == "parallel":
            y, *written = attend(shared := normed_input("attention_norm", x))
            return x + y + mlp(normed_input("mlp_norm", x) if layer.has_parallel_mlp_norm else shared), *written
        if layer.block == "post_norm":
            y, *written = attend(Normed(x, None))
            x = normed("attention_norm", x + y)
            return normed("mlp_norm", x + mlp(Normed(x, None))), *written
        y, *written = attend(normed_input("attention_norm", x))
        x = x + (normed("attention_post_norm", y) if layer.block == "sandwich" else y)
        y = mlp(normed_input("mlp_norm", x))
        return x + (normed("mlp_post_norm", y) if layer.block == "sandwich" else y), *written


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_layer(config: ModelConfig, layer: LayerConfig, num_candidates: int, params: Params, *arguments):
    """Runs a layer. Equal layers of a compiled pass are lowered as one function."""
    return Layer(config, layer, parent=None).apply({"params": params}, *arguments, num_candidates)


class Decoder(nn.Module):
    """Embedding, layers, norm and head.

    Layers are unrolled, not scanned: a scan that returns its cache copies it, and a scan that carries it
    hides each layer's buffer from in-place kernels. Layers of one kind are traced and lowered once for all.
    """

    config: ModelConfig

    def setup(self):
        """Declares the tensors outside the layers, and the layers."""
        config = self.config
        D, E = config.width, config.embedding_width or config.width
        self.embedding = declare_weight(self, "embedding", (E, config.vocab_size), ("embed", "vocab"))
        if config.embedding_width is not None:
            self.embedding_projection = declare(self, "embedding_projection", (E, D), (None, "embed"))
        if config.hidden_width is not None:
            self.hidden_norm = declare_norm(self, "hidden_norm", self._hidden_norm, config.hidden_width, None)
            self.hidden_projection = declare(self, "hidden_projection", (config.hidden_width, D), (None, "embed"))
            self.hidden_output = declare(self, "hidden_output", (D, config.hidden_width), ("embed", None))
        if config.has_learned_positions:
            rows = config.context + config.position_offset
            self.position_embedding = declare(self, "position_embedding", (rows, D), (None, "embed"))
        self.layers = [Layer(config, layer, name=f"layer_{i}") for i, layer in enumerate(config.layers)]
        if config.final_norm is not None:
            self.final_norm = declare_norm(self, "final_norm", config.final_norm, D)
        if config.has_output_projection:
            self.output_projection = declare(self, "output_projection", (D, E), ("embed", None))
        O = config.output_vocab_size or config.vocab_size  # noqa: E741
        if not config.is_tied:
            rows = E if config.has_output_projection else D
            self.head = declare_weight(self, "head", (rows, O), ("embed", "vocab"))
        if config.has_head_bias:
            self.head_bias = declare(self, "head_bias", (O,), ("vocab",), zeros)

    def _embed(self, tokens, positions, hidden):
        config = self.config
        # Out-of-range ids (padding of -1) read column 0 and are never used.
        columns = jnp.clip(tokens, 0, config.vocab_size - 1)
        x = jnp.moveaxis(jnp.take(self.embedding.values, columns, axis=1), 0, -1)
        if self.embedding.scale is not None:
            x = (x * self.embedding.scale[columns][..., None]).astype(config.dtype)
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if config.embedding_width is not None:
            x = product(x, self.embedding_projection, rounds_to=config.product_dtype)
        if hidden is not None:
            normed = apply_norm(self._hidden_norm, hidden, self.hidden_norm)
            x += product(normed, self.hidden_projection, rounds_to=config.product_dtype)
        if config.has_learned_positions:
            rows = jnp.clip(positions, 0, config.context - 1) + config.position_offset
            x = x + jnp.take(self.position_embedding, rows, axis=0)
        return x

    @property
    def _hidden_norm(self) -> NormConfig:
        return dataclasses.replace(self.config.layers[0].norm, kind="rms")

    def _angles(self, positions):
        """Returns the cosines and sines for each kind of rotary positions and head size, None for none."""
        kinds = dict.fromkeys((layer.attention.rope, layer.attention.head_dim) for layer in self.config.layers)
        return {
            (rope, head_dim): None if rope is None else rotary.angles(positions, rope, head_dim)
            for rope, head_dim in kinds
        }

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | PagedCache | None,
        num_candidates: int = 1,
        hidden: Float[Array, "B T E"] | None = None,
    ):
        """Runs embedding, layers and final norm; prefill needs no more than this.

        Without a cache, the tokens are whole sequences from position 0 on, and nothing is scattered: the
        pass to differentiate. With several chains, also returns their new keys and values, ``[B, T, K, H]`` per layer.
        `hidden` is the target's hidden state at the token before each, where the configuration has a `hidden_width`.
        """
        config = self.config
        x = self._embed(tokens, positions, hidden)
        angles = self._angles(positions)
        written = []
        nothing = (None,) * config.num_layers
        cached = (nothing, nothing) if cache is None else layers_of(cache)
        params = self.variables.get("params", {})
        for i, (layer, k, v) in enumerate(zip(config.layers, *cached, strict=True)):
            arguments = x, positions, angles[layer.attention.rope, layer.attention.head_dim], k, v
            if self.is_initializing():
                x, *layer_written = self.layers[i](*arguments)
            else:
                x, *layer_written = _run_layer(config, layer, num_candidates, params[f"layer_{i}"], *arguments)
            written.append(layer_written)
        keys, values, *new = zip(*written, strict=True)
        if config.final_norm is not None:
            x = apply_norm(config.final_norm, x, self.final_norm)
        cache = with_layers(cache, keys, values)
        return (x, cache) if num_candidates == 1 else (x, cache, KVCache(*new))

    def next_hidden(self, hidden_states: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Foretells the target's hidden state at these tokens, which it has not read yet."""
        return product(hidden_states, self.hidden_output, rounds_to=self.config.product_dtype)

    def logits(self, hidden_states: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Scores the vocabulary, float32; on a mesh every device gets all scores."""
        config = self.config
        if config.has_output_projection:
            hidden_states = product(hidden_states, self.output_projection, rounds_to=config.product_dtype)
        head = self.embedding if config.is_tied else self.head
        # Inputs are never rounded to INT8 here, where an error would be one of the logits themselves.
        scores = multiply(hidden_states, head, dtype=jnp.float32, rounds_to=config.product_dtype)
        if config.has_head_bias:
            scores += self.head_bias.astype(jnp.float32)
        if config.logit_softcap is not None:
            scores = config.logit_softcap * jnp.tanh(scores / config.logit_softcap)
        return replicate(scores)

    def __call__(self, tokens, positions, cache):
        """Returns logits ``[B, T, O]`` float32 and the cache with the new tokens in it."""
        hidden_states, *caches = self.hidden_states(tokens, positions, cache)
        return self.logits(hidden_states), *caches


@functools.cache
def decoder(config: ModelConfig) -> Decoder:
    """Returns the one module of a configuration (a module is immutable; building it costs 100 µs)."""
    return Decoder(config)
