"""The protocol of target and draft models, its optional parts, and the checks of what a model returns.

The Flax decoder (`flax_model.Model`) is one implementation. `bass_jax.models.adapters` makes others from models in NNX,
Linen, Tunix or plain JAX.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from bass_jax.models.decoder import ForwardOutput
from bass_jax.runtime.checks import check_integer, check_pytree
from bass_jax.typing import Array, Float, Int, check_array

type Cache = Any
"""A pytree of arrays whose first axis is B, in a layout that only the model knows."""


@runtime_checkable
class TargetModel(Protocol):
    """A causal language model with a cache; also the protocol of draft models.

    A model is a frozen pytree whose parameters are leaves, so that it can be an argument of a jitted function and new
    parameters need no compilation. A slot of the cache is an absolute position. Slots at or past a row's committed
    length can hold anything, and a pass must not read slots past the position of the token that reads them.
    """

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache of `capacity` positions for `batch` rows: a pytree of arrays with the first axis B."""
        ...

    def forward(
        self, tokens: Array, positions: Array, cache: Cache, *, hidden_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """Runs one pass; prefill, verification and decoding all use it.

        Args:
            tokens: ``[B, T]`` int32.
            positions: ``[B, T]`` int32: in each row consecutive positions, then padding at or past the capacity, which
                writes nothing and whose outputs are meaningless.
            cache: contains every earlier position of each row.
            hidden_layers: static; the layers whose hidden states are returned as `ForwardOutput.hidden`, joined in this
                order. Id i is the input of layer i, and id L the output of the last layer before the final norm. With
                ``()`` the model may return what its head reads, or None. A model that cannot return the layers raises a
                `ValueError`.

        Returns:
            Logits ``[B, T, V]`` float32 of the token after each position, and the cache with the tokens of this pass.
        """
        ...


@runtime_checkable
class LimitedContext(Protocol):
    """A model that can read only so many tokens."""

    @property
    def context(self) -> int:
        """The largest number of tokens of a row."""
        ...


@runtime_checkable
class SeparateHead(Protocol):
    """A model that can leave out its head, for a prefill or a pass that scores few positions."""

    def hidden_states(
        self, tokens: Array, positions: Array, cache: Cache, *, hidden_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """Runs `TargetModel.forward` without the head: `ForwardOutput.logits` is None."""
        ...

    def logits(self, hidden: Array) -> Array:
        """Computes the logits of hidden states, float32."""
        ...


@runtime_checkable
class CandidateModel(Protocol):
    """A model that can verify several candidate drafts per row in one pass."""

    def forward_candidates(self, tokens: Array, positions: Array, cache: Cache) -> ForwardOutput:
        """Runs one pass over M continuations of every row; see `bass_jax.models.Model.forward_candidates`."""
        ...


@runtime_checkable
class RecurrentModel(Protocol):
    """A model that may have states which a lower length does not cut back."""

    @property
    def is_recurrent(self) -> bool:
        """Whether it has such states. Then the cache after a pass may have another structure, until `commit`."""
        ...

    def commit(self, cache: Cache, num_accepted: Array) -> Cache:
        """Returns the cache for the next pass, with the first ``num_accepted [B]`` tokens of the last pass.

        Padding is never kept, so the largest integer keeps all tokens. It is called once after every pass.
        """
        ...


@runtime_checkable
class ReducedVocabulary(Protocol):
    """A draft model whose head may score only some of the tokens."""

    @property
    def output_ids(self) -> Any:
        """``[O]`` int32, the token of each column of the logits; None for all tokens."""
        ...


def context_of(model: TargetModel) -> int | None:
    """Returns the largest number of tokens of a row, or None if the model has no limit."""
    return model.context if isinstance(model, LimitedContext) else None


def is_recurrent(model: Any) -> bool:
    """Returns whether a pass of the model must be committed; see `RecurrentModel`."""
    return isinstance(model, RecurrentModel) and model.is_recurrent


def commit_pass(model: Any, cache: Cache, num_accepted: Array) -> Cache:
    """Returns the cache for the next pass; see `RecurrentModel.commit`. Other models have nothing to commit."""
    return model.commit(cache, num_accepted) if is_recurrent(model) else cache


def require_rollback(name: str, model: Any) -> None:
    """Checks that rejected drafts can be undone by a lower length.

    Raises:
        ValueError: naming `name` if the model is recurrent.
    """
    if is_recurrent(model):
        raise ValueError(
            f"{name} has recurrent layers: expected attention only, because rejected drafts are rolled back"
        )


def output_ids_of(model: TargetModel | SeparateHead) -> Array | None:
    """Returns the token of each column of the logits, or None if column i is token i."""
    return model.output_ids if isinstance(model, ReducedVocabulary) else None


def read_tokens(
    model: TargetModel | SeparateHead, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B T _"], Cache]:
    """Runs a pass of which few logits are needed, or none, and commits all of its tokens.

    Returns:
        What `apply_head` computes logits from: the hidden states ``[B, T, D]`` of a model with a separate head, else
        the logits ``[B, T, V]``. And the cache.
    """
    if isinstance(model, SeparateHead):
        output = model.hidden_states(tokens, positions, cache)
        return output.hidden, _commit_all(model, output.cache, tokens)
    output = forward(model, tokens, positions, cache)
    return output.logits, _commit_all(model, output.cache, tokens)


def apply_head(model: TargetModel | SeparateHead, states: Float[Array, "B T _"]) -> Float[Array, "B T O"]:
    """Returns the logits of what `read_tokens` returned, or of some of its positions."""
    return model.logits(states) if isinstance(model, SeparateHead) else states


def read_hidden(
    model: TargetModel,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: Cache,
    hidden_layers: tuple[int, ...] = (),
) -> tuple[Float[Array, "B T _"], Cache]:
    """Runs a pass of which only the hidden states of `hidden_layers` are needed; returns them and the cache.

    All tokens of the pass are committed.
    """
    if isinstance(model, SeparateHead):
        output = model.hidden_states(tokens, positions, cache, hidden_layers=hidden_layers)
    else:
        output = forward(model, tokens, positions, cache, hidden_layers)
    return require_hidden(model, output), _commit_all(model, output.cache, tokens)


def _commit_all(model: Any, cache: Cache, tokens: Array) -> Cache:
    return commit_pass(model, cache, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))


def hidden_width_of(model: TargetModel, hidden_layers: tuple[int, ...] = ()) -> tuple[int, Any]:
    """Returns the width and the dtype of the hidden states of `hidden_layers`, without computing anything."""
    token = jnp.zeros((1, 1), jnp.int32)
    hidden = jax.eval_shape(lambda: read_hidden(model, token, token, model.init_cache(1, 64), hidden_layers)[0])
    return hidden.shape[-1], hidden.dtype


def forward(
    model: TargetModel,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: Cache,
    hidden_layers: tuple[int, ...] = (),
) -> ForwardOutput:
    """Runs a pass and checks what the model returned; see `check_output`."""
    output = model.forward(tokens, positions, cache, hidden_layers=hidden_layers)
    check_output(model, output, tokens.shape, cache)
    return output._replace(logits=output.logits.astype(jnp.float32))


def check_output(model: TargetModel, output: Any, shape: tuple[int, ...], cache: Cache) -> None:
    """Checks the types, shapes and dtypes of what a model's `forward` returned. The check runs during tracing only.

    Args:
        model: named in the error message.
        output: the object that it returned.
        shape: ``(B, T)``.
        cache: the cache that it was given.

    Raises:
        ValueError: naming the model and what was expected.
    """
    name = f"{type(model).__name__}.forward"
    if not isinstance(output, ForwardOutput):
        raise ValueError(f"{name} returned {type(output).__name__}: expected ForwardOutput(logits, cache)")
    output_ids = output_ids_of(model)
    vocab_size = model.vocab_size if output_ids is None else output_ids.shape[0]
    check_array(output.logits, f"{name}: logits", (*shape, vocab_size), jnp.floating)
    committed = output.cache
    if is_recurrent(model):
        num_tokens = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
        committed = jax.eval_shape(model.commit, output.cache, num_tokens)  # type: ignore[union-attr]
    if _shapes(cache) != _shapes(committed):
        raise ValueError(f"{name}: cache: expected a cache with the structure, shapes and dtypes of init_cache's")


def require_hidden(model: TargetModel, output: ForwardOutput) -> Array:
    """Returns the hidden states of a pass.

    Raises:
        ValueError: if there are none.
    """
    if output.hidden is None:
        raise ValueError(f"{type(model).__name__}.forward returned no hidden states, which the drafter reads")
    return output.hidden


def check_cache(model: TargetModel, cache: Cache, num_rows: int) -> Cache:
    """Returns the cache of a model's `init_cache`.

    Raises:
        ValueError: if it is no pytree of arrays whose first axis is the rows.
    """
    for leaf in jax.tree.leaves(cache):
        if getattr(leaf, "shape", ())[:1] != (num_rows,):
            found = f"shape {list(leaf.shape)}" if hasattr(leaf, "shape") else f"type {type(leaf).__name__}"
            raise ValueError(
                f"{type(model).__name__}.init_cache returned a leaf of {found}: expected arrays whose first axis is "
                f"the {num_rows} rows"
            )
    return cache


def check_model(name: str, model: Any) -> None:
    """Checks that a user's object is a model and a pytree.

    Raises:
        ValueError: naming `name`, the missing member, or how to register a pytree.
    """
    members = ("vocab_size", "init_cache", "forward")
    missing = [member for member in members if not hasattr(model, member)]
    if missing or isinstance(model, type):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        found = f"{kind} without {' and '.join(missing)}" if missing else kind
        raise ValueError(f"{name} is {found}: expected an object with vocab_size, init_cache and forward")
    check_integer(f"{type(model).__name__}.vocab_size", model.vocab_size, 1)
    check_pytree(name, model)


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
