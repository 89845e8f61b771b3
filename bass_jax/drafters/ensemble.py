"""Several drafters as one: each draft is proposed by the most confident of them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.protocols import (
    DraftContext,
    Drafter,
    Proposal,
    borrows_cache,
    hidden_layers_of,
    keeps_finished_text,
    reads_chunks,
    reads_hidden_states,
)
from bass_jax.drafters.retrieval import RetrievalDrafter
from bass_jax.typing import Array, Int

MAX_NGRAM = 6
"""The longest match of prompt lookup. After such a match the other parts are not run."""

LOOKUP_SCALE, RETRIEVAL_SCALE = 0.6, 0.4
"""Confidence scales of prompt lookup and of the datastore, relative to a network. Where they disagree with the network,
they are right less often than their confidence says. Fitted to 500 answers of the quickstart target
(docs/concepts/drafters.md)."""


class _Rows(NamedTuple):
    """The state of a drafting round."""

    tokens: Array  # [B, C] int32, committed tokens and the drafts after them
    is_open: Array  # [B] bool, the row has a draft at every position so far
    states: tuple[Any, ...]  # of the parts


class _Draft(NamedTuple):
    """One draft per row."""

    token: Array  # [B] int32
    score: Array  # [B] float32, the scaled confidence; -1 without a draft
    confidence: Array  # [B] float32, as the part reports it
    probs: Array | None  # [B, V] float32; None: deterministic


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnsembleDrafter:
    """Takes every draft from the most confident of its parts; of equally confident parts, from the first.

    The parts are run in order, one draft at a time. A part's score is its confidence times its scale; a part that
    reports no confidence has confidence 1. For a row whose best score has reached `sufficient_score`, the remaining
    parts are not run. A part treats the drafts before its own as committed tokens, so any drafter can be a part. A
    network that was not run catches up when it is next needed.

    The choice of the part depends on the tokens before a draft and not on the draft. The distribution of a draft is
    therefore the distribution of its part, and lossless rules stay lossless.

    Attributes:
        parts: drafters with the same vocabulary. One that reads hidden states has to predict them at drafts.
        confidence_scale: of each part, 0 to 1. Traced. None is 1 for all.
        sufficient_score: the score that ends the search. Traced.
    """

    parts: tuple[Drafter, ...]
    confidence_scale: Any = None  # numbers or arrays; `Any` because JAX rebuilds the tree with other objects
    sufficient_score: Any = 1.0

    def __post_init__(self):
        if not isinstance(self.parts, tuple):
            return  # JAX rebuilds the tree with other objects.
        if not self.parts:
            raise ValueError("parts=(): expected at least one drafter")
        asked = {hidden_layers_of(part) for part in self.parts if reads_hidden_states(part)}
        if len(asked) > 1:
            raise ValueError(f"parts: hidden_layers={sorted(asked)}: expected the same in all parts that read them")
        if sum(map(borrows_cache, self.parts)) > 1:
            raise ValueError("parts: expected at most one that uses the target's cache")
        scale = self.confidence_scale
        if isinstance(scale, tuple) and len(scale) != len(self.parts):
            raise ValueError(f"confidence_scale={scale}: expected {len(self.parts)} numbers, one for each part")

    @property
    def reads_hidden_states(self) -> bool:
        """Whether any part reads the target's hidden states."""
        return any(reads_hidden_states(part) for part in self.parts)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Those of the parts that read hidden states."""
        return next((hidden_layers_of(part) for part in self.parts if reads_hidden_states(part)), ())

    @property
    def reads_chunks(self) -> bool:
        """Whether prompts can be read in chunks: every part reads chunks, or has no state."""
        return all(reads_chunks(part) or not _has_state(part) for part in self.parts)

    @property
    def borrows_cache(self) -> bool:
        """Whether a part uses the target's cache."""
        return any(map(borrows_cache, self.parts))

    def borrow(self, state: tuple[Any, ...], cache: Any, lengths: Array) -> tuple[Any, ...]:
        """Passes the target's cache to the part that uses it."""
        return tuple(
            part.borrow(own, cache, lengths) if borrows_cache(part) else own
            for part, own in zip(self.parts, state, strict=True)
        )

    def give_back(self, state: tuple[Any, ...], cache: Any) -> tuple[tuple[Any, ...], Any]:
        """Takes the target's cache from the part that uses it."""
        states = list(state)
        for index, part in enumerate(self.parts):
            if borrows_cache(part):
                states[index], cache = part.give_back(states[index], cache)
        return tuple(states), cache

    @property
    def finished_text(self) -> tuple[Any, ...]:
        """Those of the parts; None for a part that keeps none."""
        return tuple(part.finished_text if keeps_finished_text(part) else None for part in self.parts)

    def remember(self, tokens: Array, length: Array) -> tuple[Any, ...]:
        """Adds a text in every part that keeps finished text."""
        return tuple(part.remember(tokens, length) if keeps_finished_text(part) else None for part in self.parts)

    def with_finished_text(self, finished_text: tuple[Any, ...]) -> "EnsembleDrafter":
        """Returns the ensemble of parts with these texts."""
        parts = zip(self.parts, finished_text, strict=True)
        parts = tuple(part.with_finished_text(own) if keeps_finished_text(part) else part for part, own in parts)
        return dataclasses.replace(self, parts=parts)

    def init(self, tokens: Array, lengths: Array, hidden: Array | None = None) -> tuple[Any, ...]:
        """Returns the states of the parts."""
        return tuple(
            part.init(tokens, lengths, hidden) if reads_hidden_states(part) else part.init(tokens, lengths)
            for part in self.parts
        )

    def start(self, num_rows: int, capacity: int) -> tuple[Any, ...]:
        """Returns the states of the parts for rows that have read nothing."""
        tokens, lengths = jnp.zeros((num_rows, capacity), jnp.int32), jnp.ones(num_rows, jnp.int32)
        return tuple(
            part.start(num_rows, capacity) if reads_chunks(part) else part.init(tokens, lengths) for part in self.parts
        )

    def read(
        self, state: tuple[Any, ...], tokens: Array, positions: Array, hidden: Array | None = None
    ) -> tuple[Any, ...]:
        """Gives a chunk of the prompts to the parts that have a state."""
        return tuple(
            part.read(own, tokens, positions, *((hidden,) if reads_hidden_states(part) else ()))
            if reads_chunks(part)
            else own
            for part, own in zip(self.parts, state, strict=True)
        )

    def observe(self, state: tuple[Any, ...], hidden: Array, positions: Array) -> tuple[Any, ...]:
        """Passes the target's hidden states to the parts that read them."""
        return tuple(
            part.observe(own, hidden, positions) if reads_hidden_states(part) else own
            for part, own in zip(self.parts, state, strict=True)
        )

    def propose(
        self, state: tuple[Any, ...], context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, tuple[Any, ...]]:
        """Drafts one position after the other; a row ends at the first position where no part has a draft."""
        if context.min_confidence is None:  # A threshold of 0 makes the parts report confidence and stops no row.
            context = context._replace(min_confidence=jnp.zeros(context.lengths.shape, jnp.float32))

        def extend(rows: _Rows, step: Int[Array, ""]) -> tuple[_Rows, _Draft]:
            return self._extend(rows, step, context, is_sampled)

        start = _Rows(context.tokens, context.num_wanted > 0, state)
        rows, drafts = jax.lax.scan(extend, start, jnp.arange(draft_len))
        drafts = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), drafts)
        num_drafted = (drafts.score >= 0).sum(axis=1, dtype=jnp.int32)
        return Proposal(drafts.token, num_drafted, drafts.probs, drafts.confidence), rows.states

    def commit(self, state: tuple[Any, ...], lengths: Array) -> tuple[Any, ...]:
        """Commits in every part."""
        return tuple(part.commit(own, lengths) for part, own in zip(self.parts, state, strict=True))

    def _extend(
        self, rows: _Rows, step: Int[Array, ""], context: DraftContext, is_sampled: bool
    ) -> tuple[_Rows, _Draft]:
        """Adds one draft to every open row."""
        lengths = context.lengths + step
        is_wanted = rows.is_open & (step < context.num_wanted)
        num_rows = lengths.shape[0]
        context = context._replace(
            tokens=rows.tokens,
            lengths=jnp.where(is_wanted, lengths, context.lengths),
            keys=jax.lax.dynamic_index_in_dim(context.keys, step, axis=1),
        )
        best = _Draft(jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, -1.0), jnp.ones(num_rows, jnp.float32), None)
        states = list(rows.states)
        for index, part in enumerate(self.parts):
            is_needed = is_wanted & (best.score < self.sufficient_score)
            own = context._replace(num_wanted=is_needed.astype(jnp.int32))
            scale = 1.0 if self.confidence_scale is None else self.confidence_scale[index]
            draft, states[index] = _propose_one(part, states[index], own, scale, is_sampled)
            best = _more_confident(best, draft)
        is_drafted = best.score >= 0
        columns = jnp.where(is_drafted, lengths, rows.tokens.shape[1])
        tokens = rows.tokens.at[jnp.arange(num_rows), columns].set(best.token, mode="drop")
        return _Rows(tokens, rows.is_open & is_drafted, tuple(states)), best


def ensemble_drafter(network: Drafter | None, datastore: RetrievalDrafter | None = None) -> EnsembleDrafter:
    """Combines prompt lookup with a draft network and a datastore.

    A match of `MAX_NGRAM` tokens is always taken. Otherwise the most confident of a shorter match, the network and the
    datastore proposes the draft.

    Args:
        network: a drafter that runs a network, or None.
        datastore: a retrieval datastore, or None.
    """
    lookup = NgramDrafter(MAX_NGRAM, 1)
    parts: list[tuple[Drafter, float]] = [(lookup, LOOKUP_SCALE)]
    if network is not None:
        parts.append((network, 1.0))
    if datastore is not None:
        parts.append((datastore, RETRIEVAL_SCALE))
    drafters, scales = zip(*parts, strict=True)
    # Half a token below the longest match, so that rounding cannot decide.
    sufficient_score = LOOKUP_SCALE * lookup.confidence_of(MAX_NGRAM - 0.5)
    return EnsembleDrafter(drafters, scales, sufficient_score)


def _has_state(part: Drafter) -> bool:
    """Returns whether a drafter has a state; one that reads hidden states has."""
    if reads_hidden_states(part):
        return True
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 64), (1,))]
    return bool(jax.tree.leaves(jax.eval_shape(part.init, *shapes)))


def _propose_one(part: Drafter, state: Any, context: DraftContext, scale: Any, is_sampled: bool) -> tuple[_Draft, Any]:
    """Proposes one draft per row with `part`, which is not run if no row wants a draft."""

    def propose(state):
        proposal, state = part.propose(state, context, 1, is_sampled=is_sampled)
        return proposal._replace(num_drafted=jnp.minimum(proposal.num_drafted, context.num_wanted)), state

    def skip(state):
        shapes = jax.eval_shape(propose, state)[0]
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), state

    if jax.tree.leaves(state):
        proposal, state = jax.lax.cond((context.num_wanted > 0).any(), propose, skip, state)
    else:  # A drafter without a state is cheap: no condition is needed.
        proposal, state = propose(state)
    tokens, num_drafted, probs, confidence = jax.tree.map(lambda leaf: leaf[:, 0] if leaf.ndim > 1 else leaf, proposal)
    confidence = jnp.ones(tokens.shape, jnp.float32) if confidence is None else confidence
    return _Draft(tokens, jnp.where(num_drafted > 0, confidence * scale, -1.0), confidence, probs), state


def _more_confident(best: _Draft, other: _Draft) -> _Draft:
    """Takes the rows from `other` where its score is higher."""
    if best.probs is None and other.probs is not None:
        best = best._replace(probs=jax.nn.one_hot(best.token, other.probs.shape[-1], dtype=jnp.float32))
    if other.probs is None and best.probs is not None:
        other = other._replace(probs=jax.nn.one_hot(other.token, best.probs.shape[-1], dtype=jnp.float32))
    is_better = other.score > best.score

    def choose(old, new):
        return jnp.where(is_better[:, None] if old.ndim > 1 else is_better, new, old)

    return jax.tree.map(choose, best, other)
