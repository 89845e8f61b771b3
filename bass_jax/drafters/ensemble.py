"""Several drafters as one: each draft is proposed by the one of them that is most confident."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters.draft_model import ModelDrafter
from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.protocols import DraftContext, Drafter, Proposal, reads_hidden_states
from bass_jax.drafters.retrieval import RetrievalDrafter
from bass_jax.typing import Array, Float, Int

LONGEST_MATCH = 6
"""Tokens of a match that prompt lookup tries at most; behind one so long nobody else is asked."""

LOOKUP_SCALE, RETRIEVAL_SCALE = 0.6, 0.4
"""Where lookup and the store differ from a network they are right less often than they say. Fitted to 500 answers of
the quickstart target (docs/drafters.md)."""


class _Drafts(NamedTuple):
    """What the rows have so far; those that are open have as many drafts as slots were filled."""

    tokens: Array  # [B, C] int32, committed tokens and drafts behind them
    is_open: Array  # [B] bool, every slot so far has a draft
    states: tuple[Any, ...]


class _Slot(NamedTuple):
    """One draft per row."""

    token: Array  # [B] int32
    is_drafted: Array  # [B] bool
    probs: Array | None  # [B, V]
    confidence: Array  # [B] float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnsembleDrafter:
    """Asks `parts` in order for every draft, and takes the most confident; of equals the first.

    How sure a part is, is its confidence times the trust that it is given; one that does not say counts as sure. A
    part is asked where none before it was worth `enough`. One that no row asks is not run, and a network catches up
    when it is needed again. A part sees the drafts before its own as if they were committed, so it needs to know
    nothing of the others; what it keeps of drafts that are rejected later is void like that of its own. Whose turn it
    is depends on the tokens before a draft alone, never on what was drawn. The distribution of a draft is therefore its
    own part's: one token for a deterministic part, a network's distribution for a network.

    Attributes:
        parts: drafters of one vocabulary. One that reads the target's hidden states has to predict them behind a draft.
        trust: of each part, 0 to 1; traced. None trusts all alike.
        enough: what ends the asking; traced.
    """

    parts: tuple[Drafter, ...]
    confidence_scale: Any = None  # numbers or arrays; anything while jax rebuilds the tree
    enough: Any = 1.0

    def __post_init__(self):
        if isinstance(self.parts, tuple) and not self.parts:
            raise ValueError("parts=(): expected at least one drafter")
        if (
            isinstance(self.parts, tuple)
            and isinstance(self.confidence_scale, tuple)
            and len(self.confidence_scale) != len(self.parts)
        ):
            raise ValueError(f"trust={self.confidence_scale}: expected {len(self.parts)} numbers, one for each part")

    @property
    def reads_hidden_states(self) -> bool:
        """Whether any part does."""
        return any(reads_hidden_states(part) for part in self.parts)

    def init(self, tokens: Array, lengths: Array, hidden_states: Array | None = None) -> tuple[Any, ...]:
        """Every part's state."""
        states = []
        for part in self.parts:
            reader: Any = part
            is_reader = reads_hidden_states(part)
            states.append(reader.init(tokens, lengths, hidden_states) if is_reader else part.init(tokens, lengths))
        return tuple(states)

    def observe(self, state: tuple[Any, ...], hidden_states: Array, positions: Array) -> tuple[Any, ...]:
        """Hands the target's hidden states to the parts that read them."""
        states = []
        for part, own in zip(self.parts, state, strict=True):
            reader: Any = part
            states.append(reader.observe(own, hidden_states, positions) if reads_hidden_states(part) else own)
        return tuple(states)

    def propose(
        self, state: tuple[Any, ...], context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, tuple[Any, ...]]:
        """Fills slot after slot; a row ends at the first that no part has a draft for."""
        if context.min_confidence is None:  # Of 0: reported, and never in the way.
            context = context._replace(min_confidence=jnp.zeros(context.lengths.shape, jnp.float32))

        def fill(drafts: _Drafts, slot: Int[Array, ""]) -> tuple[_Drafts, _Slot]:
            return self._fill(drafts, slot, context, is_sampled)

        start = _Drafts(context.tokens, context.num_wanted > 0, state)
        drafts, filled = jax.lax.scan(fill, start, jnp.arange(draft_len))
        filled = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), filled)
        num_drafted = filled.is_drafted.sum(axis=1, dtype=jnp.int32)
        proposal = Proposal(filled.token, num_drafted, filled.probs, filled.confidence)
        return proposal, drafts.states

    def commit(self, state: tuple[Any, ...], lengths: Array) -> tuple[Any, ...]:
        """Tells every part."""
        return tuple(part.commit(own, lengths) for part, own in zip(self.parts, state, strict=True))

    def _fill(
        self, drafts: _Drafts, slot: Int[Array, ""], context: DraftContext, is_sampled: bool
    ) -> tuple[_Drafts, _Slot]:
        """Asks the parts for one draft of every row that is open."""
        lengths = context.lengths + slot
        is_missing = drafts.is_open & (slot < context.num_wanted)
        behind = context._replace(
            tokens=drafts.tokens,
            lengths=jnp.where(is_missing, lengths, context.lengths),
            keys=jax.lax.dynamic_index_in_dim(context.keys, slot, axis=1),
        )
        num_rows = lengths.shape[0]
        empty = jnp.zeros((num_rows, 1), jnp.int32)
        found = Proposal(empty, jnp.zeros(num_rows, jnp.int32), None, jnp.ones((num_rows, 1), jnp.float32))
        worth = jnp.full(num_rows, -1.0)
        states = list(drafts.states)
        for index, part in enumerate(self.parts):
            is_asked = is_missing & (worth < self.enough)
            own = behind._replace(num_wanted=is_asked.astype(jnp.int32))
            proposal, states[index] = _ask(part, states[index], own, 1, is_sampled)
            found, worth = _most_confident(found, worth, proposal, self._worth(index, proposal))
        assert found.confidence is not None  # `_surest` sees to it
        is_drafted = found.num_drafted > 0
        rows = jnp.arange(num_rows)
        columns = jnp.where(is_drafted, lengths, drafts.tokens.shape[1])
        tokens = drafts.tokens.at[rows, columns].set(found.tokens[:, 0], mode="drop")
        probs = None if found.probs is None else found.probs[:, 0]
        filled = _Slot(found.tokens[:, 0], is_drafted, probs, found.confidence[:, 0])
        return _Drafts(tokens, drafts.is_open & is_drafted, tuple(states)), filled

    def _worth(self, index: int, proposal: Proposal) -> Float[Array, "B"]:
        """What a part's first draft of each row is worth; -1 where it has none."""
        confidence = jnp.ones(()) if proposal.confidence is None else proposal.confidence[:, 0]
        confidence_scale = 1.0 if self.confidence_scale is None else self.confidence_scale[index]
        return jnp.where(proposal.num_drafted > 0, confidence * confidence_scale, -1.0)


def ensemble_drafter(network: ModelDrafter | None, store: RetrievalDrafter | None = None) -> EnsembleDrafter:
    """Combines prompt lookup with what there is.

    A match of `LONGEST_MATCH` tokens first; else the most confident of a shorter match, the network and the store. How
    much their words are worth was measured on the target's answers: docs/drafters.md.

    Args:
        network: a draft that reads tokens alone, or the target's hidden states; None for none.
        store: a retrieval datastore, or None.
    """
    lookup = NgramDrafter(LONGEST_MATCH, 1)
    parts: list[tuple[Drafter, float]] = [(lookup, LOOKUP_SCALE)]
    if network is not None:
        parts.append((network, 1.0))
    if store is not None:
        parts.append((store, RETRIEVAL_SCALE))
    drafters, confidence_scale = zip(*parts, strict=True)
    # Halfway to the longest match, so that no rounding decides.
    return EnsembleDrafter(drafters, confidence_scale, enough=LOOKUP_SCALE * lookup.confidence_of(LONGEST_MATCH - 0.5))


def _ask(part: Drafter, state: Any, context: DraftContext, num_drafts: int, is_sampled: bool) -> tuple[Proposal, Any]:
    """Runs `part` unless no row wants anything of it."""

    def propose(state):
        proposal, state = part.propose(state, context, num_drafts, is_sampled=is_sampled)
        return proposal._replace(num_drafted=jnp.minimum(proposal.num_drafted, context.num_wanted)), state

    def decline(state):
        like = jax.eval_shape(propose, state)[0]
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like), state

    if not jax.tree.leaves(state):  # What keeps nothing costs nothing.
        return propose(state)
    return jax.lax.cond((context.num_wanted > 0).any(), propose, decline, state)


def _most_confident(
    old: Proposal, old_worth: Float[Array, "B"], new: Proposal, new_worth: Float[Array, "B"]
) -> tuple[Proposal, Float[Array, "B"]]:
    """Takes the rows that are worth more from `new`; a part that does not say how sure it is counts as sure."""
    is_new = new_worth > old_worth
    confidence, kept = (
        jnp.ones(one.tokens.shape, jnp.float32) if one.confidence is None else one.confidence for one in (new, old)
    )
    probs = None
    if new.probs is not None or old.probs is not None:
        vocab_size = next(one.probs.shape[-1] for one in (new, old) if one.probs is not None)
        new_distribution, old_distribution = (
            # Drafts that could be no others.
            jax.nn.one_hot(one.tokens, vocab_size, dtype=jnp.float32) if one.probs is None else one.probs
            for one in (new, old)
        )
        probs = jnp.where(is_new[:, None, None], new_distribution, old_distribution)
    most_confident = Proposal(
        jnp.where(is_new[:, None], new.tokens, old.tokens),
        jnp.where(is_new, new.num_drafted, old.num_drafted),
        probs,
        jnp.where(is_new[:, None], confidence, kept),
    )
    return most_confident, jnp.maximum(old_worth, new_worth)
