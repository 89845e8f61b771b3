"""A smaller model as drafter, with a cache of its own."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.models.flax_model import Model
from bass_jax.models.kv_cache import KVCache, PagedCache
from bass_jax.models.prefill_cache import extend_cache
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.sampling.distribution import draw, token_distribution
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array, Bool, Float, Int, Key

CATCH_UP_CHUNK = 8
"""Tokens per row that one pass reads while the draft catches up."""


class ModelDrafterState(NamedTuple):
    """The draft's cache and how much of it is true."""

    cache: KVCache | PagedCache
    num_cached: Array  # [B] int32, leading tokens whose keys and values the cache holds
    hidden: Array | None = None  # [B, C, E], the target's hidden states, behind them those predicted; None: not read
    num_known: Array | None = None  # [B] int32, leading tokens whose hidden states are the target's: all but the last


type Draft = tuple[Array, Array | None, Array | None]
"""Of every row: the token ``[B]``, the distribution that it was drawn from ``[B, V]``, and how sure its draft was
``[B]``; the
last two None where nobody asks."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts autoregressively from `model`, sampling from its own distribution under the row's own controls.

    A round starts with a pass of two tokens: after a full acceptance the last draft was never fed back, so
    two committed tokens are missing from the cache, otherwise one. After steps without drafting more are
    missing; a loop reads those first, and it costs nothing when there are none.

    A model with a `ModelConfig.hidden_width` reads at every token what the target made of the token before, and behind
    drafts what it takes for that, its own or another's. Drafts that were accepted are therefore read again, with the
    true hidden states.

    Attributes:
        model: the draft; with `output_ids` it proposes those tokens alone, and every other token has
            probability 0 in its distribution. Its vocabulary may be padded to another size than the target's.
        vocab_size: V of the target, the width of the distribution.
        min_confidence: a row ends before the first draft whose distribution gives no token this much; traced. None
            drafts on.
    """

    model: Model
    vocab_size: int = dataclasses.field(metadata={"static": True})
    min_confidence: Any = None  # a number or an array; anything while jax rebuilds the tree

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the step hands the target's hidden states to `init` and `observe`."""
        return self.model.config.hidden_width is not None

    def init(self, tokens: Array, lengths: Array, hidden_states: Array | None = None) -> ModelDrafterState:
        """Prefills all but the last token of each row."""
        cache = self.model.init_cache(tokens.shape[0], tokens.shape[1])
        before = None if hidden_states is None else jnp.pad(hidden_states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        cache = extend_cache(self.model, tokens, lengths - 1, cache, before)
        return ModelDrafterState(cache, lengths - 1, hidden_states, None if hidden_states is None else lengths - 1)

    def observe(self, state: ModelDrafterState, hidden_states: Array, positions: Array) -> ModelDrafterState:
        """Keeps the hidden states of a target pass; what was read with predicted ones is void."""
        assert state.hidden is not None and state.num_known is not None
        rows = jnp.arange(positions.shape[0])[:, None]
        hidden = state.hidden.at[rows, positions].set(hidden_states.astype(state.hidden.dtype), mode="drop")
        num_seen = jnp.where(positions < hidden.shape[1], positions + 1, 0).max(axis=1).astype(jnp.int32)
        num_known = jnp.where(num_seen > 0, num_seen, state.num_known)
        return state._replace(hidden=hidden, num_cached=_num_true(state), num_known=num_known)

    def read(self, state: ModelDrafterState, tokens: Array, positions: Array) -> ModelDrafterState:
        """Reads a piece of the prompts in one pass."""
        _, cache = self.model.hidden_states(tokens, positions, state.cache)
        num_read = (positions < cache.capacity).sum(axis=1, dtype=jnp.int32)
        return ModelDrafterState(cache, state.num_cached + num_read)

    def propose(
        self, state: ModelDrafterState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, ModelDrafterState]:
        """Runs as many passes as the row that wants most drafts; other rows write nothing in the rest.

        With ``context.min_confidence`` a row ends before its first draft whose distribution gives no token that much.
        The distribution comes before the draft, so this drops no draft for what it is.
        """
        hidden_states, state = self._start(state, context, draft_len)
        first = self._choose(hidden_states, context, context.tokens, 0, context.keys[:, 0], is_sampled)
        proposal, cache = self._continue(
            first, hidden_states, context.num_wanted, state.cache, context, context.keys, draft_len
        )
        num_fed = jnp.where(context.num_wanted > 0, jnp.maximum(proposal.num_drafted, 1) - 1, 0)
        return proposal, state._replace(cache=cache, num_cached=state.num_cached + num_fed)

    def propose_many(
        self, state: ModelDrafterState, context: DraftContext, draft_len: int, num_candidates: int, *, is_sampled: bool
    ) -> tuple[Proposal, ModelDrafterState]:
        """Draws M first tokens without replacement and continues each; no more chains than a row's distribution has
        tokens.

        The chains take turns in the cache, so that accepted drafts are read again in the next round.
        """
        hidden_states, state = self._start(state, context, draft_len)
        cache = state.cache
        logits = self._logits(hidden_states, context, context.tokens, 0)
        rows = jnp.arange(context.lengths.shape[0])
        distribution = token_distribution(logits, context.sampling_arrays).probs[:, 0] if is_sampled else None
        confidence = _confidence(logits, self._least(context))
        scores = logits[:, 0]
        candidates = []
        for index in range(num_candidates):
            # Chain 0 draws with the noise that a single chain would.
            keys = context.keys if index == 0 else _candidate_keys(context.keys, index)
            if distribution is None:
                first, probs = argmax(scores), None
                is_possible = scores[rows, first] > -jnp.inf
            else:
                first, probs, is_possible = self._next_first(distribution, scores, keys[:, 0], context)
                distribution = distribution.at[rows, first].set(0.0)
            scores = scores.at[rows, first].set(-jnp.inf)
            num_wanted = jnp.where(is_possible, context.num_wanted, 0)
            draft = (first, probs, confidence)
            candidate, cache = self._continue(draft, hidden_states, num_wanted, cache, context, keys, draft_len)
            candidates.append(candidate)
        proposal = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *candidates)
        return proposal, state._replace(cache=cache)

    def commit(self, state: ModelDrafterState, lengths: Array) -> ModelDrafterState:
        """Keeps what was fed and accepted; the last committed token is never in the cache."""
        num_known = None if state.num_known is None else lengths - 1
        return state._replace(num_cached=jnp.minimum(_num_true(state), lengths - 1), num_known=num_known)

    def _start(
        self, state: ModelDrafterState, context: DraftContext, draft_len: int
    ) -> tuple[Float[Array, "B 1 D"], ModelDrafterState]:
        """Reads the tokens that the cache lacks; returns the draft's own hidden states after the last."""
        # Of a step before: the last draft and the bonus token, or all that was accepted.
        num_slots = draft_len + 1 if self.reads_hidden_states else 2
        state = self._catch_up(state, context, num_slots)
        rows = jnp.arange(context.lengths.shape[0])
        positions = state.num_cached[:, None] + jnp.arange(num_slots)
        is_drafting = context.num_wanted > 0
        is_missing = (positions < context.lengths[:, None]) & is_drafting[:, None]
        hidden_states, cache = self._read(state, context, positions, is_missing)
        last = jnp.clip(context.lengths - 1 - state.num_cached, 0, num_slots - 1)
        hidden_states = hidden_states[rows, last][:, None]
        state = state._replace(cache=cache, num_cached=jnp.where(is_drafting, context.lengths, state.num_cached))
        return hidden_states, self._predict(state, hidden_states, is_drafting)

    def _read(
        self, state: ModelDrafterState, context: DraftContext, positions: Int[Array, "B T"], is_missing: Array
    ) -> tuple[Array, KVCache | PagedCache]:
        """Reads the tokens at `positions`, where they are missing."""
        rows = jnp.arange(context.lengths.shape[0])[:, None]
        tokens = context.tokens[rows, jnp.minimum(positions, context.tokens.shape[1] - 1)]
        hidden = None
        if state.hidden is not None:
            hidden = state.hidden[rows, jnp.clip(positions - 1, 0, state.hidden.shape[1] - 1)]
            hidden = jnp.where((positions > 0)[..., None], hidden, 0)
        positions = jnp.where(is_missing, positions, state.cache.capacity)
        return self.model.hidden_states(tokens, positions, state.cache, hidden)

    def _continue(
        self,
        first: Draft,
        hidden_states: Float[Array, "B 1 D"],
        num_wanted: Int[Array, "B"],
        cache: KVCache | PagedCache,
        context: DraftContext,
        keys: Key[Array, "B G"],
        draft_len: int,
    ) -> tuple[Proposal, KVCache | PagedCache]:
        """Drafts on after the first draft, which was drawn from `hidden states`."""
        num_rows = num_wanted.shape[0]
        rows = jnp.arange(num_rows)[:, None]
        columns = context.lengths[:, None] + jnp.arange(draft_len)
        is_sampled = first[1] is not None
        least = self._least(context)
        # Token, distribution and confidence of every draft; the last two only where they are wanted.
        drafted = jax.tree.map(
            lambda leaf: jnp.zeros((num_rows, draft_len, *leaf.shape[1:]), leaf.dtype).at[:, 0].set(leaf), first
        )

        def extend(carry):
            step, num_drafted, drafted, hidden, cache = carry
            position = jnp.where(step < num_drafted, context.lengths - 1 + step, cache.capacity)[:, None]
            token = jax.lax.dynamic_index_in_dim(drafted[0], step - 1, axis=1)
            hidden_states, cache = self.model.hidden_states(token, position, cache, hidden)
            tokens = context.tokens
            if not context.processors.is_identity:
                tokens = tokens.at[rows, columns].set(drafted[0], mode="drop")
            draft = self._choose(hidden_states, context, tokens, step, keys[:, step], is_sampled)
            drafted = jax.tree.map(
                lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, step, axis=1), drafted, draft
            )
            num_drafted = _until_unsure(num_drafted, step, draft[2], least)
            return step + 1, num_drafted, drafted, self._next_hidden(hidden_states), cache

        num_drafted = _until_unsure(num_wanted, 0, first[2], least)
        start = (jnp.int32(1), num_drafted, drafted, self._next_hidden(hidden_states), cache)
        _, num_drafted, (tokens, distributions, confidences), _, cache = jax.lax.while_loop(
            lambda carry: carry[0] < carry[1].max(), extend, start
        )
        return Proposal(tokens, num_drafted, distributions, confidences), cache

    def _least(self, context: DraftContext) -> Array | None:
        """How sure a draft has to be, ``[B]``; None where nobody asks."""
        if self.min_confidence is None:
            return context.min_confidence
        least = jnp.broadcast_to(jnp.asarray(self.min_confidence, jnp.float32), context.lengths.shape)
        return least if context.min_confidence is None else jnp.maximum(least, context.min_confidence)

    def _predict(
        self, state: ModelDrafterState, hidden_states: Float[Array, "B 1 D"], is_read: Bool[Array, "B"]
    ) -> ModelDrafterState:
        """Keeps what the draft takes for the target's hidden states at the last token read, where they are not known."""
        if state.hidden is None or state.num_known is None:
            return state
        last = state.num_cached - 1
        columns = jnp.where(is_read & (last >= state.num_known), last, state.hidden.shape[1])
        predicted = self.model.next_hidden(hidden_states)[:, 0].astype(state.hidden.dtype)
        rows = jnp.arange(columns.shape[0])
        return state._replace(hidden=state.hidden.at[rows, columns].set(predicted, mode="drop"))

    def _next_hidden(self, hidden_states: Float[Array, "B 1 D"]) -> Float[Array, "B 1 E"] | None:
        """What a draft that reads the target's hidden states takes for them where the target has not been."""
        return self.model.next_hidden(hidden_states) if self.reads_hidden_states else None

    def _choose(
        self, hidden_states: Array, context: DraftContext, tokens: Array, step, keys: Key[Array, "B"], is_sampled: bool
    ) -> Draft:
        """Draws one draft per row from hidden states ``[B, 1, D]``."""
        # What the draft can propose is few tokens: their distribution is made before it is spread over the target's
        # vocabulary.
        is_narrow = context.processors.is_identity
        logits = self._own_logits(hidden_states) if is_narrow else self._logits(hidden_states, context, tokens, step)
        confidence = _confidence(logits, self._least(context))
        if not is_sampled:
            column = argmax(logits[:, 0])
            ids = self.model.output_ids if is_narrow else None
            return (column if ids is None else ids[column]), None, confidence
        probs = token_distribution(logits, context.sampling_arrays).probs[:, 0]
        if is_narrow:
            probs = self._spread(probs, 0.0)
        return draw(probs, gumbel(keys, self.vocab_size)), probs, confidence

    def _own_logits(self, hidden_states: Array) -> Array:
        """Over the tokens that the draft can propose, ``[B, 1, O]``."""
        logits = self.model.logits(hidden_states)
        # Vocabularies padded to different sizes: what the target lacks is not proposed.
        return logits[..., : self.vocab_size] if self.model.output_ids is None else logits

    def _logits(self, hidden_states: Array, context: DraftContext, tokens: Array, step) -> Array:
        """Adjusted, over the target's vocabulary, ``[B, 1, V]``: -inf for what cannot be proposed."""
        logits = self._spread(self._own_logits(hidden_states), -jnp.inf)
        return context.processors(logits, tokens, context.lengths + step)

    def _spread(self, values: Array, missing: float) -> Array:
        """Puts ``[..., O]`` in the places of their tokens, ``[..., V]``."""
        if self.model.output_ids is not None:
            full = jnp.full((*values.shape[:-1], self.vocab_size), missing, values.dtype)
            return full.at[..., self.model.output_ids].set(values, unique_indices=True)
        padding = self.vocab_size - values.shape[-1]
        widths = [(0, 0)] * (values.ndim - 1) + [(0, padding)]
        return jnp.pad(values, widths, constant_values=missing) if padding else values

    def _next_first(self, distribution: Array, scores: Array, keys: Key[Array, "B"], context: DraftContext):
        """Draws a first token from what is left of `distribution` ``[B, V]``; returns it, its distribution and
        whether there is one.

        At temperature 0 nothing is left after one token; the next best by `scores` follows, which is not drawn at all.
        """
        rows = jnp.arange(distribution.shape[0])
        mass = distribution.sum(axis=-1)
        is_greedy = (jnp.asarray(context.sampling_arrays.temperature) <= 0) & (mass <= 0)
        best = argmax(scores)
        one_hot = jax.nn.one_hot(best, distribution.shape[-1], dtype=jnp.float32)
        probs = jnp.where(is_greedy[:, None], one_hot, distribution / jnp.where(mass > 0, mass, 1.0)[:, None])
        first = draw(probs, gumbel(keys, self.vocab_size))
        return first, probs, (mass > 0) | (is_greedy & (scores[rows, best] > -jnp.inf))

    def _catch_up(self, state: ModelDrafterState, context: DraftContext, num_slots: int) -> ModelDrafterState:
        """Reads tokens until one pass of `num_slots` can read what is missing from every drafting row.

        Behind a token whose hidden states are not known the draft reads one token a pass: it has to predict them.
        """

        def num_behind(state):
            num = context.lengths - num_slots - state.num_cached
            if state.num_known is not None:
                num = jnp.maximum(num, context.lengths - 1 - jnp.maximum(state.num_known, state.num_cached))
            return jnp.where(context.num_wanted > 0, num, 0)

        def read(state):
            num_read = jnp.clip(num_behind(state), 0, CATCH_UP_CHUNK)
            if state.num_known is not None:
                num_read = jnp.minimum(num_read, jnp.maximum(state.num_known - state.num_cached, 0) + 1)
            slots = jnp.arange(CATCH_UP_CHUNK)
            positions = state.num_cached[:, None] + slots
            hidden_states, cache = self._read(state, context, positions, slots < num_read[:, None])
            last = hidden_states[jnp.arange(num_read.shape[0]), jnp.maximum(num_read, 1) - 1][:, None]
            state = state._replace(cache=cache, num_cached=state.num_cached + num_read)
            return self._predict(state, last, num_read > 0)

        return jax.lax.while_loop(lambda state: (num_behind(state) > 0).any(), read, state)


def _num_true(state: ModelDrafterState) -> Int[Array, "B"]:
    """Leading tokens that the cache holds as they will stay: those that were read with the target's own hidden
    states.
    """
    return state.num_cached if state.num_known is None else jnp.minimum(state.num_cached, state.num_known + 1)


def _candidate_keys(keys: Key[Array, "B G"], candidate: int) -> Key[Array, "B G"]:
    """Noise of a further chain."""
    return jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, candidate)))(keys)


def _confidence(logits: Array, least: Array | None) -> Array | None:
    """The most probable token's probability, ``[B]``, of the raw distribution: at temperature 0 the warped one is
    always sure.
    """
    if least is None:
        return None
    return jax.nn.softmax(logits[:, 0].astype(jnp.float32)).max(axis=-1)


def _until_unsure(num_drafted: Array, step: Array | int, confidence: Array | None, least: Array | None) -> Array:
    """Cuts rows at draft `step` where its distribution is too flat."""
    if confidence is None or least is None:
        return num_drafted
    return jnp.where(confidence < least, jnp.minimum(num_drafted, step), num_drafted)
