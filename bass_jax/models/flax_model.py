"""A model: parameters and their configuration as one pytree, with a pure forward pass."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from bass_jax.models import kv_cache as kv
from bass_jax.models.decoder import ForwardOutput, decoder
from bass_jax.models.kv_cache import KVCache, PagedCache
from bass_jax.models.mesh import split_heads
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.recurrent_state import allocate_states
from bass_jax.runtime.checks import check_kind
from bass_jax.typing import Array, Float, Int, Key, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with its parameters; can be an argument of a jitted function.

    Attributes:
        params: nested dict of arrays in the layout of `bass_jax.models.decoder`.
        config: static.
        output_ids: ``[O]`` int32, distinct: the token of each column of a head with a reduced vocabulary; None if the
            head scores the whole vocabulary.
    """

    params: Params
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    output_ids: Any = None  # an array or None; `Any` because JAX rebuilds the tree with other objects

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """The largest number of tokens of a row."""
        return self.config.context

    @property
    def is_recurrent(self) -> bool:
        """Whether there are recurrent layers, so that a pass needs a `commit`."""
        return bool(self.config.recurrences)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache of `capacity` slots for `batch` rows."""
        return split_heads(_empty_cache(self.config, batch, capacity), self.config.tensor_axis)

    def commit(self, cache: KVCache | PagedCache, num_accepted: Int[Array, "B"]) -> KVCache | PagedCache:
        """Keeps the first tokens of the last pass in the states of recurrent layers.

        Args:
            cache: from a pass.
            num_accepted: number of tokens to keep per row; padding is never kept.
        """
        return kv.commit(cache, num_accepted)

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | PagedCache,
        *,
        hidden_layers: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Runs one pass; prefill, verification and decoding all use it.

        Args:
            tokens: ``[B, T]`` int32.
            positions: ``[B, T]`` int32: in each row consecutive positions, then padding at or past ``cache.capacity``,
                which writes nothing and whose outputs are meaningless.
            cache: contains every earlier position of each row.
            hidden_layers: static; the hidden states to return as `ForwardOutput.hidden`, joined in this order. Id i is
                the input of layer i, before its norm; id L is the output of the last layer, before the final norm.
                With ``()`` it is what the head reads: the output of the final norm. No others are kept.

        Raises:
            ValueError: if `hidden_layers` is not a tuple of integers from 0 to L.
        """
        check_hidden_layers(hidden_layers, self.config.num_layers)
        return _apply(self.config, self.params, tokens, positions, cache, hidden_layers)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | PagedCache | None,
        hidden: Float[Array, "B T E"] | None = None,
        *,
        hidden_layers: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Runs `forward` without the head, for a prefill or for a pass that scores few positions.

        Without a cache, the tokens are whole sequences from position 0 on, and the pass can be differentiated.
        `hidden` is for drafts with a `ModelConfig.hidden_width`: the target's hidden states at the token before each.
        """
        check_hidden_layers(hidden_layers, self.config.num_layers)
        arguments = tokens, positions, cache, 1, hidden, hidden_layers
        return _apply(self.config, self.params, *arguments, method="hidden_states")

    def forward_candidates(
        self, tokens: Int[Array, "B M T"], positions: Int[Array, "B M T"], cache: KVCache | PagedCache
    ) -> ForwardOutput:
        """Runs one pass over M alternative continuations of every row; the weights are read once.

        Args:
            tokens: ``[B, M, T]`` int32.
            positions: ``[B, M, T]`` int32; those of each candidate as in `forward`.
            cache: contains every earlier position of each row.

        Returns:
            Logits ``[B, M, T, O]`` and hidden states ``[B, M, T, D]``. The cache contains one candidate's tokens.
            `bass_jax.models.kv_cache.keep_candidate` makes the cache of any of them from `ForwardOutput.candidates`.
        """
        B, M, T = tokens.shape
        flat = tokens.reshape(B, M * T), positions.reshape(B, M * T)
        output = _apply(self.config, self.params, *flat, cache, M, method="hidden_states")

        def per_candidate(leaf):
            return leaf.reshape(B, M, T, *leaf.shape[2:])

        return ForwardOutput(
            per_candidate(self.logits(output.hidden)),
            output.cache,
            per_candidate(output.hidden),
            jax.tree.map(per_candidate, output.candidates),
        )

    def next_hidden(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Predicts the target's hidden states from the model's own, for drafts with a `ModelConfig.hidden_width`."""
        return _apply(self.config, self.params, hidden, method="next_hidden")

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Computes the logits of hidden states, float32."""
        return _apply(self.config, self.params, hidden, method="logits")


def check_hidden_layers(hidden_layers: tuple[int, ...], num_layers: int) -> None:
    """Checks the ids of hidden states; see `Model.forward`.

    Raises:
        ValueError: if they are not a tuple of integers from 0 to L.
    """
    is_id = isinstance(hidden_layers, tuple) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= num_layers for one in hidden_layers
    )
    if not is_id:
        raise ValueError(f"hidden_layers={hidden_layers!r}: expected a tuple of integers from 0 to {num_layers}")


def require_model(model: Any, purpose: str) -> Model:
    """Returns `model` if it is this package's own decoder, whose configuration `purpose` needs.

    Raises:
        ValueError: if it is another model.
    """
    if not isinstance(model, Model):
        raise ValueError(f"target is {type(model).__name__}: expected a bass_jax.models.Model for {purpose}")
    return model


def _apply(config: ModelConfig, params: Params, *arguments, method: str | None = None) -> Any:
    # `Any`, because Linen annotates the result of `apply` as (result, variables).
    return decoder(config).apply({"params": params}, *arguments, method=method)


def init_params(config: ModelConfig, key: Key[Array, ""]) -> Params:
    """Returns random parameters, without their logical axes."""
    return nn.meta.unbox(_traced_init(config, key, jax.jit))


def abstract_params(config: ModelConfig) -> Params:
    """Returns the shapes and dtypes of the parameters, boxed with their logical axes, without computing anything.

    Equal layers are traced once, which saves a second for a deep model.
    """
    kinds = tuple(dict.fromkeys(config.layers))
    found = dict(_abstract(dataclasses.replace(config, layers=kinds)))
    by_kind = {layer: found.pop(f"layer_{index}") for index, layer in enumerate(kinds)}
    layers = {f"layer_{index}": by_kind[layer] for index, layer in enumerate(config.layers)}
    # A copy, because the cached tree must not change.
    return jax.tree.map(lambda leaf: leaf, dict(sorted((found | layers).items())))


def param_shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of every parameter, by its path, such as ``"layer_0/attention/qkv"``."""
    return flatten_dict(nn.meta.unbox(abstract_params(config)), sep="/")  # type: ignore[return-value]


@functools.cache
def _abstract(config: ModelConfig) -> Params:
    # The key is abstract too, because making one runs the device.
    key = jax.eval_shape(jax.random.key, 0)
    return _traced_init(config, key, lambda init: lambda key: jax.eval_shape(init, key))


def _empty_cache(config: ModelConfig, batch: int, capacity: int) -> KVCache:
    cache = kv.allocate(config.cache_shapes, batch, capacity, jnp.dtype(config.cache_dtype or config.dtype))
    return cache._replace(states=allocate_states(config.recurrences, batch, jnp.dtype(config.dtype)))


def _traced_init(config, key, transform):
    def init(key):
        # The arrays are made inside the traced function, where an abstract pass allocates nothing.
        tokens = jnp.zeros((1, 1), jnp.int32)
        cache = _empty_cache(dataclasses.replace(config, cache_dtype=None), 1, 8)
        return decoder(config).init(key, tokens, tokens, cache)["params"]

    return transform(init)(key)


def init_model(config: ModelConfig, key: Key[Array, ""]) -> Model:
    """Returns a model with random parameters.

    Raises:
        ValueError: if `config` is no `ModelConfig`.
    """
    check_kind("config", config, ModelConfig)
    return Model(init_params(config, key), config, default_output_ids(config))


def default_output_ids(config: ModelConfig) -> Array | None:
    """Returns `Model.output_ids` of a new model: the first O tokens, or None for a head with the whole vocabulary."""
    return None if config.output_vocab_size is None else jnp.arange(config.output_vocab_size, dtype=jnp.int32)
