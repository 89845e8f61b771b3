"""A model: parameters and their configuration, as one pytree with a pure forward pass."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bass_jax.models import kv_cache as kv
from bass_jax.models.decoder import decoder
from bass_jax.models.kv_cache import KVCache, PagedCache
from bass_jax.models.mesh import split_heads
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.checks import check_kind
from bass_jax.typing import Array, Float, Int, Key, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with its parameters; passes through `jax.jit` as an argument.

    Attributes:
        params: nested dict of arrays in the layout of `bass_jax.models.decoder`.
        config: static.
        output_ids: ``[O]`` int32, distinct: the token that each column of a trimmed head stands for;
            None when the head scores the whole vocabulary.
    """

    params: Params
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    output_ids: Any = None  # an array or None; anything while jax rebuilds the tree

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Makes an empty cache of `capacity` slots for `batch` rows."""
        config = self.config
        dtype = jnp.dtype(config.cache_dtype or config.dtype)
        cache = kv.allocate(_cache_heads(config), batch, capacity, dtype)
        return split_heads(cache, config.tensor_axis)

    def forward(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache | PagedCache
    ) -> tuple[Float[Array, "B T O"], KVCache | PagedCache]:
        """One pass: prefill, verification and decoding alike.

        Args:
            tokens: ``[B, T]`` int32.
            positions: ``[B, T]`` int32; in each row consecutive from its first, then padding at or past
                ``cache.capacity``, which writes nothing and whose outputs mean nothing.
            cache: holds every earlier position of each row.

        Returns:
            ``(logits, cache)``: logits ``[B, T, O]`` float32 of the token after each position, and the
            cache with these positions written.
        """
        return forward(self.config, self.params, tokens, positions, cache)

    def forward_candidates(
        self, tokens: Int[Array, "B M T"], positions: Int[Array, "B M T"], cache: KVCache
    ) -> tuple[Float[Array, "B M T O"], KVCache, KVCache]:
        """One pass over M alternative continuations of every row; the weights are read once.

        Args:
            tokens: ``[B, M, T]`` int32.
            positions: ``[B, M, T]`` int32; each chain's as in `forward`.
            cache: holds every earlier position of each row.

        Returns:
            ``(logits, cache, new)``: the cache holds one candidate's tokens; `new` holds the keys and values of all,
            ``[B, M, T, K, H]`` per layer, from which `bass_jax.models.kv_cache.keep_candidate` makes the cache of any
            of them.
        """
        B, M, T = tokens.shape
        flat = tokens.reshape(B, M * T), positions.reshape(B, M * T)
        hidden_states, cache, new = _apply(self.config, self.params, *flat, cache, M, method="hidden_states")
        new = jax.tree.map(lambda leaf: leaf.reshape(B, M, T, *leaf.shape[2:]), new)
        return self.logits(hidden_states).reshape(B, M, T, -1), cache, new

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | PagedCache,
        hidden: Float[Array, "B T E"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | PagedCache]:
        """`forward` without the head: what a prefill needs, or a pass of which few positions are scored.

        `hidden` is for drafts with a `ModelConfig.hidden_width`: the target's hidden states at the token before each.
        """
        return _apply(self.config, self.params, tokens, positions, cache, 1, hidden, method="hidden_states")

    def next_hidden(self, hidden_states: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """What a draft with a `ModelConfig.hidden_width` takes for the target's hidden states at these tokens."""
        return _apply(self.config, self.params, hidden_states, method="next_hidden")

    def logits(self, hidden_states: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Scores the vocabulary, float32."""
        return _apply(self.config, self.params, hidden_states, method="logits")


def _cache_heads(config: ModelConfig) -> list[tuple[int, int]]:
    return [(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in config.layers]


def forward(config: ModelConfig, params: Params, tokens, positions, cache) -> Any:
    """`Model.forward` for callers that hold parameters alone, such as a loss to be differentiated."""
    return _apply(config, params, tokens, positions, cache)


def _apply(config: ModelConfig, params: Params, *arguments, method: str | None = None) -> Any:
    # Linen annotates the results of `apply` with what they are only when variables are mutable.
    return decoder(config).apply({"params": params}, *arguments, method=method)


def init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters, with the logical axes stripped."""
    return nn.meta.unbox(_traced_init(config, key, jax.jit))


def abstract_params(config: ModelConfig) -> Params:
    """Returns shapes and dtypes of the parameters, boxed with their logical axes; nothing is computed.

    Equal layers are traced once, which saves a second when a deep model is loaded.
    """
    kinds = tuple(dict.fromkeys(config.layers))
    found = dict(_abstract(dataclasses.replace(config, layers=kinds)))
    by_kind = {layer: found.pop(f"layer_{index}") for index, layer in enumerate(kinds)}
    layers = {f"layer_{index}": by_kind[layer] for index, layer in enumerate(config.layers)}
    # A tree of the caller's own: the one that is kept must not change.
    return jax.tree.map(lambda leaf: leaf, dict(sorted((found | layers).items())))


@functools.cache
def _abstract(config: ModelConfig) -> Params:
    # Of the key, too, the shape alone: making one runs the device.
    key = jax.eval_shape(jax.random.key, 0)
    return _traced_init(config, key, lambda init: lambda key: jax.eval_shape(init, key))


def _traced_init(config, key, transform):
    def init(key):
        # Made inside, where an abstract pass allocates nothing.
        tokens = jnp.zeros((1, 1), jnp.int32)
        dtype = jnp.dtype(config.dtype)
        cache = kv.allocate(_cache_heads(config), 1, 8, dtype)
        return decoder(config).init(key, tokens, tokens, cache)["params"]

    return transform(init)(key)


def init_model(config: ModelConfig, key: Key[Array, ""]) -> Model:
    """Makes a model with random parameters.

    Raises:
        ValueError: if `config` is no `ModelConfig`.
    """
    check_kind("config", config, ModelConfig)
    output_ids = None
    if config.output_vocab_size is not None:
        output_ids = jnp.arange(config.output_vocab_size, dtype=jnp.int32)
    return Model(init_params(config, key), config, output_ids)
