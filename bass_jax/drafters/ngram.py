"""Prompt lookup: proposes what followed the last n tokens when they occurred before."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.typing import Array

_DOUBT = 2
"""What follows a match of n tokens is the target's token n / (n + 2) of the time: 0.25, 0.53, 0.65, 0.70, 0.76 and 0.78
for 1 to 6 tokens where 0.33 to 0.75 is said, over 500 greedy answers of SmolLM2-135M-Instruct (docs/drafters.md)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Deterministic, no model, no state.

    Matches the longest suffix first and takes its most recent earlier occurrence. A match that overlaps the
    end is continued periodically, so that a loop in the text fills every draft. The longer the match the surer the
    draft, and the next is surer still; with ``context.min_confidence`` a match that is too short is none.

    Attributes:
        max_ngram: longest suffix tried.
        min_ngram: shortest suffix tried, at least 1.

    Source: Saxena 2023, prompt lookup decoding; Yang et al. 2023 (arXiv 2304.04487), inference with reference.
    """

    max_ngram: int = dataclasses.field(default=3, metadata={"static": True})
    min_ngram: int = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram}: expected 1 to max_ngram={self.max_ngram}")

    def init(self, tokens: Array, lengths: Array) -> None:
        """Nothing to keep: the committed tokens are all it reads."""
        del tokens, lengths

    def propose(self, state: None, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, None]:
        """Looks the suffixes up; a row without a match drafts nothing."""
        candidates, state = self.propose_many(state, context, draft_len, 1, is_sampled=is_sampled)
        assert candidates.confidence is not None
        return Proposal(candidates.tokens[:, 0], candidates.num_drafted[:, 0], None, candidates.confidence[:, 0]), state

    def propose_many(
        self, state: None, context: DraftContext, draft_len: int, num_candidates: int, *, is_sampled: bool
    ) -> tuple[Proposal, None]:
        """Takes the best occurrence, then the best of those that go on with another token, and so forth."""
        del is_sampled
        lookup = functools.partial(self._lookup, draft_len=draft_len, num_candidates=num_candidates)
        tokens, matched = jax.vmap(lookup)(context.tokens, context.lengths)
        confidence = self.confidence_of(matched[..., None] + jnp.arange(draft_len, dtype=jnp.float32))
        is_drafted = matched > 0
        if context.min_confidence is not None:
            is_drafted &= confidence[..., 0] >= context.min_confidence[:, None]
        num_drafted = jnp.where(is_drafted, context.num_wanted[:, None], 0)
        return Proposal(tokens, num_drafted, None, confidence), state

    @staticmethod
    def confidence_of[T: (Array, float)](num_matched: T) -> T:
        """How often what followed a match of so many tokens is the target's token."""
        return num_matched / (num_matched + _DOUBT)

    def commit(self, state: None, lengths: Array) -> None:
        """Nothing to keep."""
        del state, lengths

    def _lookup(self, tokens: Array, length: Array, *, draft_len: int, num_candidates: int) -> tuple[Array, Array]:
        """One row: ``tokens [C]`` → drafts ``[M, G]``, and how many tokens their matches have, ``[M]``; 0 is none."""
        end = jnp.arange(tokens.shape[0])  # an occurrence is named by the position after it
        run = jnp.zeros(tokens.shape, jnp.int32)
        is_equal = jnp.ones(tokens.shape, bool)
        for back in range(1, self.max_ngram + 1):
            last = tokens[jnp.maximum(length - back, 0)]
            shifted = jnp.roll(tokens, back)  # shifted[end] = tokens[end - back]
            is_equal &= (shifted == last) & (end >= back) & (length >= back)
            run += is_equal
        run = jnp.where((end < length) & (run >= self.min_ngram), run, 0)
        drafts, matched = [], []
        for _ in range(num_candidates):
            # The longest run wins; among equals the most recent.
            best = jnp.argmax(run * tokens.shape[0] + end)
            period = jnp.maximum(length - best, 1)
            drafts.append(tokens[jnp.clip(best + jnp.arange(draft_len) % period, 0, tokens.shape[0] - 1)])
            matched.append(run[best])
            run = jnp.where(tokens == tokens[best], 0, run)
        return jnp.stack(drafts).astype(jnp.int32), jnp.stack(matched)
