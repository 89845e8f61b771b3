"""A draft model whose tokenizer is not the target's."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.drafters.autoregressive import choose_draft, continue_draft
from bass_jax.drafters.draft_model import ModelDrafterState, read_committed
from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.models.decoder import ForwardOutput
from bass_jax.models.prefill_cache import read_in_chunks
from bass_jax.models.protocol import (
    Cache,
    TargetModel,
    apply_head,
    check_cache,
    output_ids_of,
    read_tokens,
    require_rollback,
)
from bass_jax.typing import Array, Float, Int

SLOTS_PER_TOKEN = 2
"""Slots of the draft model's cache per token of the row. A row whose text needs more stops drafting."""


class VocabularyMatch(NamedTuple):
    """How the tokens of a target are written in the tokens of a draft model, on the host.

    `bass_jax.checkpoint.match_vocabularies` makes one from two tokenizers.
    """

    own_tokens: np.ndarray  # [V, W] int32, the draft model's tokens of each token of the target, padded on the right
    num_own: np.ndarray  # [V] int32, how many there are, 1 to W
    output_ids: np.ndarray  # [O] int32, distinct: the target's tokens whose text is one token of the draft model
    own_ids: np.ndarray  # [O] int32, distinct: that token
    start_tokens: np.ndarray  # [P] int32, what the draft model reads before a text, such as its own BOS token

    def __str__(self) -> str:
        V, O = len(self.num_own), len(self.output_ids)  # noqa: E741
        return (
            f"the draft model can propose {O:,} of the target's {V:,} tokens ({O / V:.0%}), "
            f"and reads {self.num_own.mean():.2f} of its own tokens per token of the target's vocabulary"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedTokens:
    """A draft model that scores only the tokens which the target has too.

    It reads its own tokens, and the columns of its logits are tokens of the target.

    Attributes:
        model: the draft model.
        columns: ``[O]`` int32, the columns of the model's logits that are used.
        output_ids: ``[O]`` int32, the target's token of each.
    """

    model: TargetModel
    columns: Any  # arrays; `Any` because JAX rebuilds the tree with other objects
    output_ids: Any

    def hidden_states(
        self, tokens: Array, positions: Array, cache: Cache, *, hidden_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """Runs a pass of the model without its head; see `bass_jax.models.protocol.read_tokens`."""
        states, cache = read_tokens(self.model, tokens, positions, cache)
        return ForwardOutput(None, cache, states)

    def logits(self, hidden: Float[Array, "B T _"]) -> Float[Array, "B T O"]:
        """Computes the logits of the shared tokens."""
        return apply_head(self.model, hidden)[..., self.columns]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OtherVocabularyDrafter:
    """Drafts autoregressively with a model that has another tokenizer than the target.

    The model proposes only tokens whose text is a token in both vocabularies. Its distribution is restricted to them
    and renormalized, and every other token of the target has probability 0. Lossless rules therefore stay lossless.

    A committed token that the model does not have is read as several of its own tokens, by a table. The text of a row
    is therefore always split where the target's tokens end, and the draft model's tokenizer could split it elsewhere.
    This changes how good the drafts are, and not the output. A draft is always one token in both vocabularies.

    The model's cache has `SLOTS_PER_TOKEN` slots per token of the row's capacity. A row whose committed text needs more
    stops drafting. Where a token is in this cache follows from the tokens before it, which are counted in every round.
    The cache is dense, also if the target's cache has pages, prompts are read whole, and there is a single candidate.

    Attributes:
        model: the draft model, restricted to the shared tokens.
        vocab_size: V of the target, the width of the proposed distributions.
        own_tokens: ``[V, W]`` int32, see `VocabularyMatch`.
        num_own: ``[V]`` int32, see `VocabularyMatch`.
        start_tokens: ``[P]`` int32, see `VocabularyMatch`.
        min_confidence: as in `bass_jax.drafters.ModelDrafter`; the confidence is that of the renormalized distribution.

    Source: Timor et al. 2025 (arXiv 2502.05202): token-level intersection (TLI).
    """

    model: SharedTokens
    vocab_size: int = dataclasses.field(metadata={"static": True})
    own_tokens: Any  # arrays; `Any` because JAX rebuilds the tree with other objects
    num_own: Any
    start_tokens: Any
    min_confidence: Any = None  # a number or an array

    def init(self, tokens: Array, lengths: Array) -> ModelDrafterState:
        """Reads all but the last token of each row.

        Raises:
            ValueError: if the model has recurrent layers.
        """
        require_rollback("the draft model", self.model.model)
        num_rows, capacity = tokens.shape
        num_slots = SLOTS_PER_TOKEN * capacity
        model = self.model.model
        cache = check_cache(model, model.init_cache(num_rows, num_slots), num_rows)
        ends = self._ends(tokens, lengths - 1)
        own = self._own_tokens_at(tokens, ends, jnp.broadcast_to(jnp.arange(num_slots), (num_rows, num_slots)))

        def read(cache, tokens, positions):
            return read_tokens(self.model, tokens, positions, cache)[1]

        cache = read_in_chunks(read, cache, own, jnp.minimum(ends[:, -1], num_slots), num_slots)
        num_fitting = (ends <= num_slots).sum(axis=1, dtype=jnp.int32)
        return ModelDrafterState(cache, jnp.minimum(num_fitting, lengths - 1))

    def propose(
        self, state: ModelDrafterState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, ModelDrafterState]:
        """Drafts up to `draft_len` tokens per row, one pass per token.

        `state.num_cached` counts tokens of the target, and the model is run with positions of its own tokens.
        """
        capacity = context.tokens.shape[1]
        num_slots = SLOTS_PER_TOKEN * capacity
        ends = self._ends(context.tokens, context.lengths)
        own_lengths = ends[:, -1]
        num_wanted = jnp.clip(num_slots - own_lengths, 0, context.num_wanted)
        context, is_drafting = context._replace(num_wanted=num_wanted), num_wanted > 0
        num_read = jnp.take_along_axis(ends, jnp.maximum(state.num_cached - 1, 0)[:, None], axis=1)[:, 0]
        own_state = ModelDrafterState(state.cache, jnp.where(state.num_cached > 0, num_read, 0))

        def token_at(slots):
            return self._own_tokens_at(context.tokens, ends, slots)

        hidden_states, own_state = read_committed(self.model, own_state, own_lengths, is_drafting, token_at, num_slots)
        first = choose_draft(self, hidden_states, context, context.tokens, 0, context.keys[:, 0], is_sampled)

        def read_draft(token, position, cache):
            own_position = position + (own_lengths - context.lengths)[:, None]
            own_position = jnp.where(position < capacity, own_position, num_slots)
            return read_tokens(self.model, self.own_tokens[token, 0], own_position, cache)

        proposal, cache = continue_draft(
            self, first, read_draft, own_state.cache, num_wanted, context, context.keys, draft_len
        )
        num_fed = jnp.maximum(proposal.num_drafted, 1) - 1
        num_cached = jnp.where(is_drafting, context.lengths + num_fed, state.num_cached)
        return proposal, ModelDrafterState(cache, num_cached)

    def commit(self, state: ModelDrafterState, lengths: Array) -> ModelDrafterState:
        """Keeps the accepted tokens that the model has read; the last committed token is read again."""
        return state._replace(num_cached=jnp.minimum(state.num_cached, lengths - 1))

    def _ends(self, tokens: Int[Array, "B C"], lengths: Int[Array, "B"]) -> Int[Array, "B C"]:
        """Returns how many of its own tokens the model reads up to the end of each token; constant past `lengths`."""
        is_committed = jnp.arange(tokens.shape[1]) < lengths[:, None]
        num_read = jnp.cumsum(jnp.where(is_committed, self.num_own[tokens], 0), axis=1, dtype=jnp.int32)
        return len(self.start_tokens) + num_read

    def _own_tokens_at(
        self, tokens: Int[Array, "B C"], ends: Int[Array, "B C"], slots: Int[Array, "B T"]
    ) -> Int[Array, "B T"]:
        """Returns the model's own tokens at its own positions `slots`; arbitrary ones past the last."""

        def find(ends, slots):
            return jnp.searchsorted(ends, slots, side="right", method="scan_unrolled")

        index = jnp.minimum(jax.vmap(find)(ends, slots), tokens.shape[1] - 1)
        token, end = (jnp.take_along_axis(values, index, axis=1) for values in (tokens, ends))
        column = slots - (end - self.num_own[token])
        own = self.own_tokens[token, jnp.clip(column, 0, self.own_tokens.shape[1] - 1)]
        num_start = len(self.start_tokens)
        if num_start == 0:
            return own
        return jnp.where(slots < num_start, self.start_tokens[jnp.minimum(slots, num_start - 1)], own)


def other_vocabulary_drafter(model: TargetModel, match: VocabularyMatch) -> OtherVocabularyDrafter:
    """Returns the drafter that runs `model`.

    Args:
        model: a draft model. One with a reduced vocabulary proposes those of its tokens that the target has too.
        match: its vocabulary and the target's.

    Raises:
        ValueError: if the model can propose no token of the target.
    """
    output_ids = output_ids_of(model)
    own_ids = np.arange(model.vocab_size) if output_ids is None else np.asarray(output_ids)
    _, columns, places = np.intersect1d(own_ids, match.own_ids, assume_unique=True, return_indices=True)
    if not len(columns):
        raise ValueError("the draft model can propose no token of the target: their vocabularies share none")
    shared = SharedTokens(model, *(jnp.asarray(ids, jnp.int32) for ids in (columns, match.output_ids[places])))
    tables = (match.own_tokens, match.num_own, match.start_tokens)
    return OtherVocabularyDrafter(shared, len(match.num_own), *(jnp.asarray(table, jnp.int32) for table in tables))
