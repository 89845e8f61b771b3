"""Several drafters as one: each draft is proposed by the first of them that can."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters.base import DraftContext, Drafter, Proposal, reads_features
from bass_jax.drafters.model import ModelDrafter
from bass_jax.drafters.ngram import NgramDrafter
from bass_jax.drafters.store import StoreDrafter
from bass_jax.typing import Array, Bool, Int

LONGEST_MATCH, LONG_MATCH = 6, 3
"""Tokens of a match that prompt lookup tries at most, and that are worth more than a network's word."""

SURE = 0.3
"""Probability of a network's likeliest token below which a short match is worth more."""


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
class CombinedDrafter:
    """Asks `parts` in order for every draft: a long match of prompt lookup, a network where it is sure, and so on.

    A part sees the drafts before its own as if they were committed, so it needs to know nothing of the others; what it
    keeps of drafts that are rejected later is void like that of its own. Whose turn it is depends on the tokens before
    a draft alone. The law of a draft is therefore its own part's: one token for a deterministic part, a network's law
    for a network. A part that no row needs at a draft is not run there; a network catches up when it is needed again.

    Attributes:
        parts: drafters of one vocabulary. One that reads the target's features is asked last, for whole rows that no
            other part has a draft for: the features behind a draft are not known yet.
    """

    parts: tuple[Drafter, ...]

    def __post_init__(self):
        if isinstance(self.parts, tuple) and not self.parts:
            raise ValueError("parts=(): expected at least one drafter")

    @property
    def reads_features(self) -> bool:
        """Whether any part does."""
        return any(reads_features(part) for part in self.parts)

    def init(self, tokens: Array, lengths: Array, features: Array | None = None) -> tuple[Any, ...]:
        """Every part's state."""
        states = []
        for part in self.parts:
            reader: Any = part
            is_reader = reads_features(part)
            states.append(reader.init(tokens, lengths, features) if is_reader else part.init(tokens, lengths))
        return tuple(states)

    def observe(self, state: tuple[Any, ...], features: Array, positions: Array) -> tuple[Any, ...]:
        """Hands the target's features to the parts that read them."""
        states = []
        for part, own in zip(self.parts, state, strict=True):
            reader: Any = part
            states.append(reader.observe(own, features, positions) if reads_features(part) else own)
        return tuple(states)

    def propose(
        self, state: tuple[Any, ...], context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, tuple[Any, ...]]:
        """Fills slot after slot; a row ends at the first that no part has a draft for."""

        def fill(drafts: _Drafts, slot: Int[Array, ""]) -> tuple[_Drafts, _Slot]:
            return self._fill(drafts, slot, context, is_sampled)

        start = _Drafts(context.tokens, context.num_wanted > 0, state)
        drafts, filled = jax.lax.scan(fill, start, jnp.arange(draft_len))
        filled = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), filled)
        num_drafted = filled.is_drafted.sum(axis=1, dtype=jnp.int32)
        proposal = Proposal(filled.token, num_drafted, filled.probs, filled.confidence)
        states = list(drafts.states)
        for index, part in enumerate(self.parts):
            if reads_features(part):
                is_empty = proposal.num_drafted == 0
                own = context._replace(num_wanted=jnp.where(is_empty, context.num_wanted, 0))
                whole, states[index] = _ask(part, states[index], own, draft_len, is_sampled)
                proposal = _choose(is_empty, whole, proposal)
        return proposal, tuple(states)

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
        states = list(drafts.states)
        for index, part in enumerate(self.parts):
            if reads_features(part):
                continue
            is_asked = is_missing & (found.num_drafted == 0)
            own = behind._replace(num_wanted=is_asked.astype(jnp.int32))
            proposal, states[index] = _ask(part, states[index], own, 1, is_sampled)
            found = _choose(is_asked, proposal, found)
        assert found.confidence is not None  # `_choose` sees to it
        is_drafted = found.num_drafted > 0
        rows = jnp.arange(num_rows)
        columns = jnp.where(is_drafted, lengths, drafts.tokens.shape[1])
        tokens = drafts.tokens.at[rows, columns].set(found.tokens[:, 0], mode="drop")
        probs = None if found.probs is None else found.probs[:, 0]
        filled = _Slot(found.tokens[:, 0], is_drafted, probs, found.confidence[:, 0])
        return _Drafts(tokens, drafts.is_open & is_drafted, tuple(states)), filled


def combined_drafter(network: ModelDrafter | None, store: StoreDrafter | None = None) -> CombinedDrafter:
    """Combines prompt lookup with what there is.

    A long match first; the network where it is sure enough; then whatever matched at all, and the store. Without a
    network every match comes first. Which order is best was measured on held-out answers: docs/drafters.md.

    Args:
        network: a draft that reads tokens alone, or the target's features; None for none.
        store: an n-gram store, or None.
    """
    if network is None:
        parts: list[Drafter] = [NgramDrafter(LONGEST_MATCH, 1)]
    else:
        sure = dataclasses.replace(network, min_confidence=SURE)
        parts = [NgramDrafter(LONGEST_MATCH, LONG_MATCH), sure, NgramDrafter(LONG_MATCH - 1, 1)]
    if store is not None:
        parts.append(store)
    return CombinedDrafter(tuple(parts))


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


def _choose(is_new: Bool[Array, "B"], new: Proposal, old: Proposal) -> Proposal:
    """Takes the rows `is_new` from `new`; a part that does not say how sure it is counts as sure."""
    confidence, kept = (
        jnp.ones(one.tokens.shape, jnp.float32) if one.confidence is None else one.confidence for one in (new, old)
    )
    probs = None
    if new.probs is not None or old.probs is not None:
        vocab_size = next(one.probs.shape[-1] for one in (new, old) if one.probs is not None)
        new_law, old_law = (
            # Drafts that could be no others.
            jax.nn.one_hot(one.tokens, vocab_size, dtype=jnp.float32) if one.probs is None else one.probs
            for one in (new, old)
        )
        probs = jnp.where(is_new[:, None, None], new_law, old_law)
    return Proposal(
        jnp.where(is_new[:, None], new.tokens, old.tokens),
        jnp.where(is_new, new.num_drafted, old.num_drafted),
        probs,
        jnp.where(is_new[:, None], confidence, kept),
    )
