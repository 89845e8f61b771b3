"""How drafts are chosen, one after the other or all at once; shared by the drafters that run a network."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.models.protocol import SeparateHead, TargetModel, apply_head, output_ids_of
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.sampling.distribution import sample_tokens, token_distribution
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array, Float, Int, Key

CATCH_UP_CHUNK = 8
"""Tokens per row that one pass reads while a draft model catches up with the committed tokens."""

type Draft = tuple[Array, Array | None, Array | None]
"""One draft per row: its token ``[B]``, the distribution that it was sampled from ``[B, V]``, and its confidence
``[B]``. The last two are None where they are not needed."""


@runtime_checkable
class NetworkDrafter(Protocol):
    """A drafter that runs a network."""

    @property
    def model(self) -> TargetModel | SeparateHead:
        """The draft model, or a head on the target's hidden states."""
        ...

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        ...

    @property
    def min_confidence(self) -> Any:
        """The confidence below which a row stops, or None."""
        ...


def continue_draft(
    drafter: NetworkDrafter,
    first: Draft,
    read_draft: Callable[[Array, Array, Any], tuple[Array, Any]],
    carry: Any,
    num_wanted: Int[Array, "B"],
    context: DraftContext,
    keys: Key[Array, "B G"],
    draft_len: int,
) -> tuple[Proposal, Any]:
    """Drafts autoregressively after the first draft.

    The loop runs as many passes as the row that wants most drafts. The other rows write nothing in the remaining
    passes. A row ends before its first draft whose confidence is below the threshold. This depends on the distribution
    and not on the sampled token, so a lossless rule stays lossless.

    Args:
        drafter: whose model drafts.
        first: the first draft of each row.
        read_draft: ``(tokens [B, 1], positions [B, 1], carry) -> (hidden states [B, 1, D], carry)`` runs the model;
            entries at the position C are padding. The hidden states are those of `read_tokens`: logits for a model
            without a separate head.
        carry: the cache, and what else `read_draft` needs.
        num_wanted: drafts of each row.
        context: the rows.
        keys: of the drafts.
        draft_len: G.
    """
    num_rows, capacity = context.tokens.shape
    rows = jnp.arange(num_rows)[:, None]
    columns = context.lengths[:, None] + jnp.arange(draft_len)
    is_sampled = first[1] is not None
    threshold = confidence_threshold(drafter, context)
    drafted = jax.tree.map(
        lambda leaf: jnp.zeros((num_rows, draft_len, *leaf.shape[1:]), leaf.dtype).at[:, 0].set(leaf), first
    )

    def extend(loop):
        step, num_drafted, drafted, carry = loop
        position = jnp.where(step < num_drafted, context.lengths - 1 + step, capacity)[:, None]
        token = jax.lax.dynamic_index_in_dim(drafted[0], step - 1, axis=1)
        hidden_states, carry = read_draft(token, position, carry)
        tokens = context.tokens
        if not context.processors.is_identity:
            tokens = tokens.at[rows, columns].set(drafted[0], mode="drop")
        draft = choose_draft(drafter, hidden_states, context, tokens, step, keys[:, step], is_sampled)
        drafted = jax.tree.map(
            lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, step, axis=1), drafted, draft
        )
        return step + 1, _stop_below(threshold, num_drafted, step, draft[2]), drafted, carry

    end = start = (jnp.int32(1), _stop_below(threshold, num_wanted, 0, first[2]), drafted, carry)
    if draft_len > 1:  # A loop without passes would be compiled too.
        end = jax.lax.while_loop(lambda loop: loop[0] < loop[1].max(), extend, start)
    _, num_drafted, (tokens, probs, confidence), carry = end
    return Proposal(tokens, num_drafted, probs, confidence), carry


def choose_draft(
    drafter: NetworkDrafter,
    hidden_states: Float[Array, "B 1 D"],
    context: DraftContext,
    tokens: Int[Array, "B C"],
    step: Array | int,
    keys: Key[Array, "B"],
    is_sampled: bool,
) -> Draft:
    """Samples one draft per row, or takes the most probable token, given the model's hidden states.

    Without logits processors, the distribution is computed over the model's own vocabulary and only then spread over
    the target's, because the model's may be much smaller.
    """
    logits = _own_logits(drafter, hidden_states)
    return _choose(drafter, logits, context, tokens, step, keys, is_sampled)


def choose_drafts(
    drafter: NetworkDrafter, hidden_states: Float[Array, "B G D"], context: DraftContext, *, is_sampled: bool
) -> Proposal:
    """Chooses all drafts of a row, given the model's hidden states at all of them.

    The distribution of a draft does not depend on the drafts before it, except by logits processors.
    """
    rows = jnp.arange(hidden_states.shape[0])
    threshold = confidence_threshold(drafter, context)
    logits = _own_logits(drafter, hidden_states)

    def choose(carry, step):
        tokens, num_drafted = carry
        own = jax.lax.dynamic_slice_in_dim(logits, step, 1, axis=1)
        keys = jax.lax.dynamic_index_in_dim(context.keys, step, axis=1, keepdims=False)
        draft = _choose(drafter, own, context, tokens, step, keys, is_sampled)
        if not context.processors.is_identity:
            tokens = tokens.at[rows, context.lengths + step].set(draft[0], mode="drop")
        return (tokens, _stop_below(threshold, num_drafted, step, draft[2])), draft

    start, steps = (context.tokens, context.num_wanted), jnp.arange(hidden_states.shape[1])
    (_, num_drafted), drafts = jax.lax.scan(choose, start, steps)
    tokens, probs, confidence = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), drafts)
    return Proposal(tokens, num_drafted, probs, confidence)


def _choose(
    drafter: NetworkDrafter,
    logits: Float[Array, "B 1 O"],
    context: DraftContext,
    tokens: Int[Array, "B C"],
    step: Array | int,
    keys: Key[Array, "B"],
    is_sampled: bool,
) -> Draft:
    """Chooses one draft per row by the logits of the model's own vocabulary."""
    is_narrow = context.processors.is_identity
    if not is_narrow:
        logits = _processed(drafter, logits, context, tokens, step)
    confidence = draft_confidence(drafter, logits, context)
    if not is_sampled:
        column = argmax(logits[:, 0])
        ids = output_ids_of(drafter.model) if is_narrow else None
        return (column if ids is None else ids[column]), None, confidence
    probs = token_distribution(logits, context.sampling_arrays).probs[:, 0]
    if is_narrow:
        probs = _spread(drafter, probs, 0.0)
    return sample_tokens(probs, gumbel(keys, drafter.vocab_size)), probs, confidence


def draft_logits(
    drafter: NetworkDrafter, hidden_states: Array, context: DraftContext, tokens: Array, step: Array | int
) -> Float[Array, "B 1 V"]:
    """Returns processed logits over the target's vocabulary; -inf for tokens that the model cannot propose."""
    return _processed(drafter, _own_logits(drafter, hidden_states), context, tokens, step)


def _processed(
    drafter: NetworkDrafter, logits: Float[Array, "B 1 O"], context: DraftContext, tokens: Array, step: Array | int
) -> Float[Array, "B 1 V"]:
    return context.processors(_spread(drafter, logits, -jnp.inf), tokens, context.lengths + step)


def draft_confidence(drafter: NetworkDrafter, logits: Array, context: DraftContext) -> Float[Array, "B"] | None:
    """Returns the probability of the most probable token before temperature, or None if there is no threshold.

    The temperature is left out because at temperature 0 every token would have probability 1.
    """
    if confidence_threshold(drafter, context) is None:
        return None
    return jax.nn.softmax(logits[:, 0].astype(jnp.float32)).max(axis=-1)


def confidence_threshold(drafter: NetworkDrafter, context: DraftContext) -> Float[Array, "B"] | None:
    """Returns the larger of the drafter's and the context's `min_confidence`, or None if neither is set."""
    if drafter.min_confidence is None:
        return context.min_confidence
    threshold = jnp.broadcast_to(jnp.asarray(drafter.min_confidence, jnp.float32), context.lengths.shape)
    return threshold if context.min_confidence is None else jnp.maximum(threshold, context.min_confidence)


def tokens_at(context: DraftContext, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the committed tokens at `positions`."""
    rows = jnp.arange(positions.shape[0])[:, None]
    return context.tokens[rows, jnp.minimum(positions, context.tokens.shape[1] - 1)]


def _stop_below(
    threshold: Array | None, num_drafted: Array, step: Array | int, confidence: Array | None
) -> Int[Array, "B"]:
    """Ends rows before draft `step` where its confidence is below the threshold."""
    if confidence is None or threshold is None:
        return num_drafted
    return jnp.where(confidence < threshold, jnp.minimum(num_drafted, step), num_drafted)


def _own_logits(drafter: NetworkDrafter, hidden_states: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
    """Returns logits over the tokens that the model can propose."""
    logits = apply_head(drafter.model, hidden_states)
    # The model's vocabulary may be padded beyond the target's.
    return logits[..., : drafter.vocab_size] if output_ids_of(drafter.model) is None else logits


def _spread(drafter: NetworkDrafter, values: Float[Array, "... O"], missing: float) -> Float[Array, "... V"]:
    """Moves values over the model's vocabulary to their tokens in the target's; other tokens get `missing`."""
    output_ids = output_ids_of(drafter.model)
    if output_ids is not None:
        full = jnp.full((*values.shape[:-1], drafter.vocab_size), missing, values.dtype)
        return full.at[..., output_ids].set(values, unique_indices=True)
    padding = drafter.vocab_size - values.shape[-1]
    widths = [(0, 0)] * (values.ndim - 1) + [(0, padding)]
    return jnp.pad(values, widths, constant_values=missing) if padding else values
