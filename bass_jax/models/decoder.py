"""One decoder for all families, in Flax Linen.

Every tensor is declared once, with its shape, its initializer and its logical axes. Two layouts are chosen for speed
and for sharding:

* ``qkv [K, R + 2, H, D]``: the R query heads of a key-value head, then its key, then its value. A layer has one product
  instead of three, and sharding K keeps a group on one device.
* ``embedding [V, E]``: the layout of the head, so that a tied model stores the matrix once.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bass_jax.models import rotary
from bass_jax.models.attention import Attention, LayerOutput
from bass_jax.models.gated_delta import GatedDelta
from bass_jax.models.kv_cache import KVCache, PagedCache, join_layers, split_layers
from bass_jax.models.latent_attention import LatentAttention
from bass_jax.models.mesh import replicate_on_mesh
from bass_jax.models.mlp import MLP
from bass_jax.models.model_config import GatedDeltaConfig, LayerConfig, ModelConfig, MoEConfig, NormConfig
from bass_jax.models.moe import MoE
from bass_jax.models.norm import Normed, apply_norm, declare_norm, norm_for_projections
from bass_jax.models.parameters import declare, zeros
from bass_jax.models.recurrent_state import PendingState
from bass_jax.models.weights import declare_weight, embed, multiply, product
from bass_jax.typing import Array, Float, Int, Params


class ForwardOutput(NamedTuple):
    """The result of a pass."""

    logits: Any  # [B, T, O] float32, of the token after each position; None after a pass without the head
    cache: Any  # KVCache or PagedCache, with the tokens of this pass
    hidden: Any = None  # [B, T, D], the hidden states that the head reads; with `hidden_layers` [B, T, len * D], theirs
    candidates: Any = None  # KVCache of [B, M, T, K, H] per layer, after a pass over M candidate drafts


class Layer(nn.Module):
    """A mixer and an MLP around the residual stream, in the order of `LayerConfig.block`.

    Attributes:
        config: of the model.
        layer: of this layer.
    """

    config: ModelConfig
    layer: LayerConfig

    @nn.compact
    def __call__(self, x, positions, angles, keys, values, num_candidates=1) -> LayerOutput:
        """Returns the new residual stream with what the mixer returns; see `Attention` and `GatedDelta`.

        In a recurrent layer `angles` is None, `keys` are a `RecurrentState`, and `values` tell which tokens are no
        padding.
        """
        config, layer = self.config, self.layer

        def normed(name, x):
            return apply_norm(layer.norm, x, declare_norm(self, name, layer.norm, config.width))

        def normed_input(name, x):
            return norm_for_projections(layer.norm, x, declare_norm(self, name, layer.norm, config.width))

        def attend(x) -> LayerOutput:
            if isinstance(layer.mixer, GatedDeltaConfig):
                return GatedDelta(config, layer.mixer, name="gated_delta")(x, values, keys, num_candidates)
            kind = Attention if layer.attention.latent is None else LatentAttention
            attention = kind(config, layer.attention, name="attention")
            return attention(x, positions, angles, keys, values, num_candidates)

        def add(x, y):
            return x + (y if layer.residual_scale == 1.0 else layer.residual_scale * y)

        mlp = (MoE if isinstance(layer.mlp, MoEConfig) else MLP)(config, layer.mlp, name="mlp")  # type: ignore
        if layer.block == "parallel":
            shared = normed_input("attention_norm", x)
            out = attend(shared)
            y = mlp(normed_input("mlp_norm", x) if layer.has_parallel_mlp_norm else shared)
            return out._replace(x=add(add(x, out.x), y))
        if layer.block == "post_norm":
            out = attend(Normed(x, None))
            x = normed("attention_norm", add(x, out.x))
            return out._replace(x=normed("mlp_norm", add(x, mlp(Normed(x, None)))))
        has_output_norms, has_input_norms = layer.block in ("sandwich", "output_norm"), layer.block != "output_norm"
        out = attend(normed_input("attention_norm", x) if has_input_norms else Normed(x, None))
        x = add(x, normed("attention_post_norm", out.x) if has_output_norms else out.x)
        y = mlp(normed_input("mlp_norm", x) if has_input_norms else Normed(x, None))
        return out._replace(x=add(x, normed("mlp_post_norm", y) if has_output_norms else y))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_layer(config: ModelConfig, layer: LayerConfig, num_candidates: int, params: Params, *arguments) -> LayerOutput:
    """Runs a layer. A compiled pass lowers equal layers as one function."""
    return Layer(config, layer, parent=None).apply({"params": params}, *arguments, num_candidates)  # type: ignore


class Decoder(nn.Module):
    """Embedding, layers, norm and head.

    Layers are unrolled, not scanned: a scan that returns the cache copies it, and a scan that carries it prevents
    kernels from updating each layer's buffer in place. Equal layers are traced and lowered once.
    """

    config: ModelConfig

    def setup(self):
        """Declares the tensors outside the layers, and the layers."""
        config = self.config
        D, E = config.width, config.embedding_width or config.width
        self.embedding = declare_weight(self, "embedding", (config.vocab_size, E), ("vocab", "embed"))
        if config.embedding_width is not None:
            self.embedding_projection = declare(self, "embedding_projection", (D, E), ("embed", None))
        if config.hidden_width is not None:
            self.hidden_norm = declare_norm(self, "hidden_norm", self._hidden_norm, config.hidden_width, axis=None)
            self.hidden_projection = declare(self, "hidden_projection", (D, config.hidden_width), ("embed", None))
            self.hidden_output = declare(self, "hidden_output", (config.hidden_width, D), (None, "embed"))
        if config.has_learned_positions:
            rows = config.context + config.position_offset
            self.position_embedding = declare(self, "position_embedding", (rows, D), (None, "embed"))
        self.layers = [Layer(config, layer, name=f"layer_{i}") for i, layer in enumerate(config.layers)]
        if config.final_norm is not None:
            self.final_norm = declare_norm(self, "final_norm", config.final_norm, D)
        if config.has_output_projection:
            self.output_projection = declare(self, "output_projection", (E, D), (None, "embed"))
        O = config.output_vocab_size or config.vocab_size  # noqa: E741
        if not config.is_tied:
            columns = E if config.has_output_projection else D
            self.head = declare_weight(self, "head", (O, columns), ("vocab", "embed"))
        if config.has_head_bias:
            self.head_bias = declare(self, "head_bias", (O,), ("vocab",), zeros)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | PagedCache | None,
        num_candidates: int = 1,
        hidden: Float[Array, "B T E"] | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Runs the embedding, the layers and the final norm, but not the head.

        Args:
            tokens: ``[B, T]`` int32.
            positions: ``[B, T]`` int32.
            cache: None for whole sequences from position 0 on. Nothing is then scattered, and the pass can be
                differentiated.
            num_candidates: number of candidate drafts in T; see `Attention`.
            hidden: the target's hidden state at the token before each, if the configuration has a `hidden_width`.
            hidden_layers: the hidden states to return; see `Model.forward`.
        """
        output, chosen = self._run(tokens, positions, cache, num_candidates, hidden, hidden_layers)
        return output if chosen is None else output._replace(hidden=chosen)

    def _run(self, tokens, positions, cache, num_candidates, hidden, hidden_layers):
        """Returns the output with what the head reads, and the states of `hidden_layers`; None for none."""
        config = self.config
        x = self._embed(tokens, positions, hidden)
        angles = self._angles(positions)
        params = self.variables.get("params", {})
        outputs, chosen = [], {}
        for i, (layer, own) in enumerate(zip(config.layers, self._cached(positions, angles, cache), strict=True)):
            if i in hidden_layers:
                chosen[i] = x
            arguments = x, positions, *own
            if self.is_initializing():
                out = self.layers[i](*arguments)
            else:
                out = _run_layer(config, layer, num_candidates, params[f"layer_{i}"], *arguments)
            x = out.x
            outputs.append(out)
        if config.num_layers in hidden_layers:
            chosen[config.num_layers] = x
        with_attention = [out for out, layer in zip(outputs, config.layers, strict=True) if not layer.is_recurrent]
        _, keys, values, new_keys, new_values = zip(*with_attention, strict=True)
        states = tuple(out.keys for out, layer in zip(outputs, config.layers, strict=True) if layer.is_recurrent)
        if config.final_norm is not None:
            x = apply_norm(config.final_norm, x, self.final_norm)
        candidates = None if num_candidates == 1 else KVCache(new_keys, new_values)
        output = ForwardOutput(None, join_layers(cache, keys, values, states), x, candidates)
        return output, jnp.concatenate([chosen[i] for i in hidden_layers], axis=-1) if hidden_layers else None

    def next_hidden(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Predicts the target's hidden states at the tokens whose own hidden states are given."""
        return product(hidden, self.hidden_output, rounds_to=self.config.product_dtype)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Computes the logits, float32; on a mesh every device gets all of them."""
        config = self.config
        if config.has_output_projection:
            hidden = product(hidden, self.output_projection, rounds_to=config.product_dtype)
        head = self.embedding if config.is_tied else self.head
        # The input is never rounded to INT8 here, because the error would be one of the logits.
        scores = multiply(hidden, head, dtype=jnp.float32, rounds_to=config.product_dtype)
        if config.has_head_bias:
            scores += self.head_bias.astype(jnp.float32)
        if config.logit_scale != 1.0:
            scores = config.logit_scale * scores
        if config.logit_softcap is not None:
            scores = config.logit_softcap * jnp.tanh(scores / config.logit_softcap)
        return replicate_on_mesh(scores)

    def __call__(self, tokens, positions, cache, hidden_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """Runs a whole pass; see `hidden_states`."""
        output, chosen = self._run(tokens, positions, cache, 1, None, hidden_layers)
        hidden = output.hidden if chosen is None else chosen
        return output._replace(logits=self.logits(output.hidden), hidden=hidden)

    def _cached(self, positions, angles, cache) -> list[tuple]:
        """Returns the angles and the cache of each layer, as `Layer` takes them."""
        config = self.config
        if cache is None:
            attended, states = [(None, None)] * len(config.attentions), [None] * len(config.recurrences)
            is_token = jnp.ones(positions.shape, bool)
        else:
            if any(isinstance(one, PendingState) for one in cache.states):
                raise ValueError("cache: expected a cache whose last pass was committed; see `Model.commit`")
            attended, states = zip(*split_layers(cache), strict=True), cache.states
            is_token = positions < cache.capacity
        attended, states = iter(attended), iter(states)
        return [
            (None, next(states), is_token)
            if layer.is_recurrent
            else (angles[layer.attention.rope, layer.attention.head_dim], *next(attended))
            for layer in config.layers
        ]

    def _embed(self, tokens, positions, hidden):
        config = self.config
        x = embed(self.embedding, tokens, config.dtype)
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
        kinds = dict.fromkeys((attention.rope, attention.head_dim) for attention in self.config.attentions)
        return {
            (rope, head_dim): None if rope is None else rotary.angles(positions, rope, head_dim, self.config.context)
            for rope, head_dim in kinds
        }


@functools.cache
def decoder(config: ModelConfig) -> Decoder:
    """Returns the module of a configuration, cached because building it takes 100 µs."""
    return Decoder(config)
