"""A smaller model as drafter, with its own cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters.autoregressive import (
    CATCH_UP_CHUNK,
    choose_draft,
    continue_draft,
    draft_confidence,
    draft_logits,
    tokens_at,
)
from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.models.kv_cache import PagedCache
from bass_jax.models.prefill_cache import read_in_chunks
from bass_jax.models.protocol import Cache, SeparateHead, TargetModel, check_cache, read_tokens, require_rollback
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.sampling.distribution import sample_tokens, token_distribution
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array, Bool, Float, Int, Key


class ModelDrafterState(NamedTuple):
    """The draft model's cache."""

    cache: Any  # the model's own pytree
    num_cached: Array  # [B] int32, leading committed tokens whose keys and values the cache holds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts autoregressively with a smaller model, with the row's own sampling settings.

    A round starts with a pass over two tokens. If all drafts were accepted, two committed tokens are missing from the
    cache, because the last draft was never an input of the model. Otherwise one is missing. After steps without
    drafts more tokens are missing; a loop reads them first.

    Attributes:
        model: the draft model, any `bass_jax.models.TargetModel`. With `output_ids` it can propose only those tokens;
            all other tokens have probability 0. Its vocabulary may be padded to another size than the target's.
        vocab_size: V of the target, the width of the proposed distributions.
        min_confidence: a row ends before the first draft whose most probable token has a lower probability. Traced.
            None disables the check.
    """

    model: TargetModel
    vocab_size: int = dataclasses.field(metadata={"static": True})
    min_confidence: Any = None  # a number or an array; `Any` because JAX rebuilds the tree with other objects

    def init(self, tokens: Array, lengths: Array) -> ModelDrafterState:
        """Prefills all but the last token of each row."""
        state = self.start(*tokens.shape)
        return read_in_chunks(self.read, state, tokens, lengths - 1, tokens.shape[1])

    def start(self, num_rows: int, capacity: int) -> ModelDrafterState:
        """Returns an empty cache.

        Raises:
            ValueError: if the model has recurrent layers.
        """
        require_rollback("the draft model", self.model)
        cache = check_cache(self.model, self.model.init_cache(num_rows, capacity), num_rows)
        return ModelDrafterState(cache, jnp.zeros(num_rows, jnp.int32))

    def read(self, state: ModelDrafterState, tokens: Array, positions: Array) -> ModelDrafterState:
        """Reads a chunk of the prompts in one pass."""
        _, cache = read_tokens(self.model, tokens, positions, state.cache)
        # A chunk ends with padding. With pages it can begin behind tokens that were read for another request.
        start = positions[:, 0] if isinstance(state.cache, PagedCache) else state.num_cached
        is_read = positions == start[:, None] + jnp.arange(tokens.shape[1])
        num_read = jnp.cumprod(is_read, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
        return ModelDrafterState(cache, start + num_read)

    def propose(
        self, state: ModelDrafterState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, ModelDrafterState]:
        """Drafts up to `draft_len` tokens per row, one pass per token."""
        hidden_states, state = self._read_committed(state, context)
        first = choose_draft(self, hidden_states, context, context.tokens, 0, context.keys[:, 0], is_sampled)
        proposal, cache = continue_draft(
            self, first, self._read_draft, state.cache, context.num_wanted, context, context.keys, draft_len
        )
        num_fed = jnp.where(context.num_wanted > 0, jnp.maximum(proposal.num_drafted, 1) - 1, 0)
        return proposal, ModelDrafterState(cache, state.num_cached + num_fed)

    def propose_many(
        self, state: ModelDrafterState, context: DraftContext, draft_len: int, num_candidates: int, *, is_sampled: bool
    ) -> tuple[Proposal, ModelDrafterState]:
        """Samples M first tokens without replacement, and continues each.

        A row has fewer candidates if fewer tokens are possible. The candidates use the same cache slots one after
        another, so the next round reads the accepted drafts again.
        """
        hidden_states, state = self._read_committed(state, context)
        cache = state.cache
        logits = draft_logits(self, hidden_states, context, context.tokens, 0)
        rows = jnp.arange(context.lengths.shape[0])
        remaining = token_distribution(logits, context.sampling_arrays).probs[:, 0] if is_sampled else None
        confidence = draft_confidence(self, logits, context)
        scores = logits[:, 0]
        candidates = []
        for index in range(num_candidates):
            # Candidate 0 has the keys of a single draft.
            keys = context.keys if index == 0 else _candidate_keys(context.keys, index)
            if remaining is None:
                first, probs = argmax(scores), None
                is_possible = scores[rows, first] > -jnp.inf
            else:
                first, probs, is_possible = self._sample_first(remaining, scores, keys[:, 0], context)
                remaining = remaining.at[rows, first].set(0.0)
            scores = scores.at[rows, first].set(-jnp.inf)
            num_wanted = jnp.where(is_possible, context.num_wanted, 0)
            draft = (first, probs, confidence)
            candidate, cache = continue_draft(
                self, draft, self._read_draft, cache, num_wanted, context, keys, draft_len
            )
            candidates.append(candidate)
        proposal = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *candidates)
        return proposal, state._replace(cache=cache)

    def commit(self, state: ModelDrafterState, lengths: Array) -> ModelDrafterState:
        """Keeps the accepted tokens that the model has read; the last committed token is never in the cache."""
        return state._replace(num_cached=jnp.minimum(state.num_cached, lengths - 1))

    def _read_committed(
        self, state: ModelDrafterState, context: DraftContext
    ) -> tuple[Float[Array, "B 1 D"], ModelDrafterState]:
        """Reads the committed tokens that the cache lacks; returns what `apply_head` needs at the last one."""
        is_drafting, token_at = context.num_wanted > 0, functools.partial(tokens_at, context)
        return read_committed(self.model, state, context.lengths, is_drafting, token_at, context.tokens.shape[1])

    def _read_draft(self, token: Array, position: Array, cache: Cache) -> tuple[Array, Cache]:
        return read_tokens(self.model, token, position, cache)

    def _sample_first(
        self, remaining: Float[Array, "B V"], scores: Float[Array, "B V"], keys: Key[Array, "B"], context: DraftContext
    ) -> tuple[Array, Array, Array]:
        """Samples a first token from the remaining probabilities.

        At temperature 0 the distribution is one-hot and nothing remains after the first candidate. The next candidate
        then begins with the token of the next highest score.

        Returns:
            The token, the distribution that it was sampled from, and whether there is such a token.
        """
        rows = jnp.arange(remaining.shape[0])
        mass = remaining.sum(axis=-1)
        is_greedy = (jnp.asarray(context.sampling_arrays.temperature) <= 0) & (mass <= 0)
        best = argmax(scores)
        one_hot = jax.nn.one_hot(best, remaining.shape[-1], dtype=jnp.float32)
        probs = jnp.where(is_greedy[:, None], one_hot, remaining / jnp.where(mass > 0, mass, 1.0)[:, None])
        first = sample_tokens(probs, gumbel(keys, self.vocab_size))
        return first, probs, (mass > 0) | (is_greedy & (scores[rows, best] > -jnp.inf))


def read_committed(
    model: TargetModel | SeparateHead,
    state: ModelDrafterState,
    lengths: Int[Array, "B"],
    is_drafting: Bool[Array, "B"],
    token_at: Callable[[Array], Array],
    capacity: int,
) -> tuple[Float[Array, "B 1 D"], ModelDrafterState]:
    """Reads the committed tokens that the cache lacks.

    Args:
        model: the draft model.
        state: its cache.
        lengths: number of committed tokens, at least 1.
        is_drafting: the rows to read. The cache of the others stays as it is.
        token_at: returns the committed tokens at positions ``[B, T]``.
        capacity: of the cache; the position that writes nothing.

    Returns:
        What `apply_head` needs at the last committed token, and the state with all committed tokens.
    """
    num_slots = 2

    def read(state, positions, is_missing):
        inputs = jnp.where(is_missing, positions, capacity)
        return read_tokens(model, token_at(positions), inputs, state.cache)

    def num_missing(state):
        return jnp.where(is_drafting, lengths - num_slots - state.num_cached, 0)

    def catch_up(state):
        num_read = jnp.clip(num_missing(state), 0, CATCH_UP_CHUNK)
        slots = jnp.arange(CATCH_UP_CHUNK)
        _, cache = read(state, state.num_cached[:, None] + slots, slots < num_read[:, None])
        return ModelDrafterState(cache, state.num_cached + num_read)

    state = jax.lax.while_loop(lambda state: (num_missing(state) > 0).any(), catch_up, state)
    positions = state.num_cached[:, None] + jnp.arange(num_slots)
    states, cache = read(state, positions, (positions < lengths[:, None]) & is_drafting[:, None])
    last = jnp.clip(lengths - 1 - state.num_cached, 0, num_slots - 1)
    num_cached = jnp.where(is_drafting, lengths, state.num_cached)
    return states[jnp.arange(last.shape[0]), last][:, None], ModelDrafterState(cache, num_cached)


def _candidate_keys(keys: Key[Array, "B G"], candidate: int) -> Key[Array, "B G"]:
    """Returns the keys of a candidate other than the first."""
    return jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, candidate)))(keys)
