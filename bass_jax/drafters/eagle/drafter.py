"""A draft model that reads the target's hidden states (EAGLE)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters.autoregressive import CATCH_UP_CHUNK, choose_draft, continue_draft, tokens_at
from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.models.decoder import ForwardOutput
from bass_jax.models.flax_model import Model
from bass_jax.models.kv_cache import KVCache, PagedCache
from bass_jax.models.prefill_cache import read_in_chunks
from bass_jax.typing import Array, Bool, Float, Int


class EagleState(NamedTuple):
    """The draft model's cache and the target's hidden states."""

    cache: KVCache | PagedCache
    num_cached: Array  # [B] int32, leading committed tokens whose keys and values the cache holds
    hidden: Array  # [B, C, E], the target's hidden states at the first `num_known` tokens, then predicted ones
    num_known: Array  # [B] int32, after a commit all committed tokens except the last


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleDrafter:
    """Drafts autoregressively with a model that also reads the target's hidden state at the previous token.

    While the model drafts, the target has not yet seen the drafts, so the model reads its own predictions of the hidden
    states (`Model.next_hidden`). After the target's pass, the model reads the accepted drafts again with the target's
    hidden states. The cache therefore always equals one pass over the committed tokens and these hidden states.

    Attributes:
        model: the draft model; its configuration has a `hidden_width`.
        vocab_size: V of the target, the width of the proposed distributions.
        min_confidence: as in `ModelDrafter`.

    Source: Li et al. 2024 (EAGLE, arXiv 2401.15077).
    """

    model: Model
    vocab_size: int = dataclasses.field(metadata={"static": True})
    min_confidence: Any = None  # a number or an array; `Any` because JAX rebuilds the tree with other objects

    @property
    def reads_hidden_states(self) -> bool:
        """Always True."""
        return True

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """(): the final hidden state."""
        return ()

    def init(self, tokens: Array, lengths: Array, hidden: Array | None = None) -> EagleState:
        """Prefills all but the last token of each row.

        Raises:
            ValueError: if `hidden` is None.
        """
        if hidden is None:
            raise ValueError("hidden=None: expected the target's hidden states, because the draft model reads them")
        known, capacity = hidden, tokens.shape[1]
        rows = jnp.arange(tokens.shape[0])[:, None]

        def read(state, tokens, positions):
            return self.read(state, tokens, positions, known[rows, jnp.minimum(positions, capacity - 1)])

        return read_in_chunks(read, self.start(*tokens.shape), tokens, lengths - 1, capacity)

    def start(self, num_rows: int, capacity: int) -> EagleState:
        """Returns an empty cache and no hidden states."""
        config = self.model.config
        hidden = jnp.zeros((num_rows, capacity, config.hidden_width or config.width), config.dtype)
        zeros = jnp.zeros(num_rows, jnp.int32)
        return EagleState(self.model.init_cache(num_rows, capacity), zeros, hidden, zeros)

    def read(self, state: EagleState, tokens: Array, positions: Array, hidden: Array) -> EagleState:
        """Stores the hidden states of a chunk of the prompts, and reads the chunk in one pass."""
        rows, capacity = jnp.arange(positions.shape[0])[:, None], state.hidden.shape[1]
        stored = state.hidden.at[rows, positions].set(self._kept(hidden).astype(state.hidden.dtype), mode="drop")
        before = previous(stored, positions)
        cache = self.model.hidden_states(tokens, positions, state.cache, before).cache
        num_read = (positions < capacity).sum(axis=1, dtype=jnp.int32)
        return EagleState(cache, state.num_cached + num_read, stored, state.num_known + num_read)

    def observe(self, state: EagleState, hidden: Array, positions: Array) -> EagleState:
        """Stores the hidden states of a target pass, and drops from the cache what was read with predicted ones."""
        rows, capacity = jnp.arange(positions.shape[0])[:, None], state.hidden.shape[1]
        stored = state.hidden.at[rows, positions].set(self._kept(hidden).astype(state.hidden.dtype), mode="drop")
        num_seen = jnp.where(positions < capacity, positions + 1, 0).max(axis=1).astype(jnp.int32)
        num_known = jnp.where(num_seen > 0, num_seen, state.num_known)
        return EagleState(state.cache, _num_final(state), stored, num_known)

    def propose(
        self, state: EagleState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, EagleState]:
        """Drafts up to `draft_len` tokens per row, one pass per token."""
        hidden_states, state = self._read_committed(state, context, draft_len)
        first = choose_draft(self, hidden_states, context, context.tokens, 0, context.keys[:, 0], is_sampled)

        def read_draft(token, position, carry):
            hidden, cache = carry
            output = self.model.hidden_states(token, position, cache, hidden)
            return output.hidden, (self.model.next_hidden(output.hidden), output.cache)

        carry = self.model.next_hidden(hidden_states), state.cache
        proposal, (_, cache) = continue_draft(
            self, first, read_draft, carry, context.num_wanted, context, context.keys, draft_len
        )
        num_fed = jnp.where(context.num_wanted > 0, jnp.maximum(proposal.num_drafted, 1) - 1, 0)
        return proposal, state._replace(cache=cache, num_cached=state.num_cached + num_fed)

    def commit(self, state: EagleState, lengths: Array) -> EagleState:
        """Keeps the accepted tokens that were read with the target's hidden states."""
        num_cached = jnp.minimum(_num_final(state), lengths - 1)
        return state._replace(num_cached=num_cached, num_known=lengths - 1)

    def _kept(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns what the state keeps of the target's hidden states."""
        return hidden

    def _read_committed(
        self, state: EagleState, context: DraftContext, draft_len: int
    ) -> tuple[Float[Array, "B 1 D"], EagleState]:
        """Reads the committed tokens that the cache lacks; returns the model's hidden states at the last one.

        All tokens that the last step committed are missing, at most ``draft_len + 1``. More are missing after steps
        without drafts, and a loop reads those first. Behind the known hidden states the model reads one token per pass,
        because it has to predict the hidden state that the next token needs. This happens in an `EnsembleDrafter`,
        where `context.tokens` includes drafts of other drafters.
        """
        num_slots = draft_len + 1
        state = self._catch_up(state, context, num_slots)
        is_drafting = context.num_wanted > 0
        positions = state.num_cached[:, None] + jnp.arange(num_slots)
        is_missing = (positions < context.lengths[:, None]) & is_drafting[:, None]
        output = self._read(state, context, positions, is_missing)
        last = jnp.clip(context.lengths - 1 - state.num_cached, 0, num_slots - 1)
        hidden_states = output.hidden[jnp.arange(last.shape[0]), last][:, None]
        state = state._replace(cache=output.cache, num_cached=jnp.where(is_drafting, context.lengths, state.num_cached))
        return hidden_states, self._predict_last(state, hidden_states, is_drafting)

    def _catch_up(self, state: EagleState, context: DraftContext, num_slots: int) -> EagleState:
        """Reads committed tokens until the cache lacks at most `num_slots`; a loop that usually runs no pass."""
        is_drafting = context.num_wanted > 0

        def num_missing(state):
            num = context.lengths - num_slots - state.num_cached
            num = jnp.maximum(num, context.lengths - 1 - jnp.maximum(state.num_known, state.num_cached))
            return jnp.where(is_drafting, num, 0)

        def catch_up(state):
            num_read = jnp.clip(num_missing(state), 0, CATCH_UP_CHUNK)
            num_read = jnp.minimum(num_read, jnp.maximum(state.num_known - state.num_cached, 0) + 1)
            slots = jnp.arange(CATCH_UP_CHUNK)
            output = self._read(state, context, state.num_cached[:, None] + slots, slots < num_read[:, None])
            last = output.hidden[jnp.arange(num_read.shape[0]), jnp.maximum(num_read, 1) - 1][:, None]
            state = state._replace(cache=output.cache, num_cached=state.num_cached + num_read)
            return self._predict_last(state, last, num_read > 0)

        return jax.lax.while_loop(lambda state: (num_missing(state) > 0).any(), catch_up, state)

    def _read(
        self, state: EagleState, context: DraftContext, positions: Int[Array, "B T"], is_missing: Bool[Array, "B T"]
    ) -> ForwardOutput:
        """Reads the tokens at `positions` where they are missing."""
        hidden = previous(state.hidden, positions)
        inputs = jnp.where(is_missing, positions, state.cache.capacity)
        return self.model.hidden_states(tokens_at(context, positions), inputs, state.cache, hidden)

    def _predict_last(
        self, state: EagleState, hidden_states: Float[Array, "B 1 D"], is_read: Bool[Array, "B"]
    ) -> EagleState:
        """Stores the predicted hidden state of the last token read, for rows where the target's is unknown."""
        last = state.num_cached - 1
        columns = jnp.where(is_read & (last >= state.num_known), last, state.hidden.shape[1])
        predicted = self.model.next_hidden(hidden_states)[:, 0].astype(state.hidden.dtype)
        rows = jnp.arange(columns.shape[0])
        return state._replace(hidden=state.hidden.at[rows, columns].set(predicted, mode="drop"))


def previous(hidden: Float[Array, "B C E"], positions: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Returns the hidden states of the positions before `positions`; zeros before position 0."""
    rows = jnp.arange(positions.shape[0])[:, None]
    before = hidden[rows, jnp.clip(positions - 1, 0, hidden.shape[1] - 1)]
    return jnp.where((positions > 0)[..., None], before, 0)


def _num_final(state: EagleState) -> Int[Array, "B"]:
    """Returns how many leading tokens the cache holds that were read with the target's hidden states."""
    return jnp.minimum(state.num_cached, state.num_known + 1)
