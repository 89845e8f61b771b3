"""Prompt lookup: proposes what followed the last n tokens when they occurred before."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from bass_jax.drafters.base import DraftContext, Proposal
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Deterministic, no model, no state.

    Matches the longest suffix first and takes its most recent earlier occurrence. A match that overlaps the
    end is continued periodically, so that a loop in the text fills every draft.

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
        proposal, state = self.propose_chains(state, context, draft_len, 1, is_sampled=is_sampled)
        return Proposal(proposal.tokens[:, 0], proposal.num_drafted[:, 0], probs=None), state

    def propose_chains(
        self, state: None, context: DraftContext, draft_len: int, num_chains: int, *, is_sampled: bool
    ) -> tuple[Proposal, None]:
        """Takes the best occurrence, then the best of those that go on with another token, and so forth."""
        del is_sampled
        lookup = functools.partial(self._lookup, draft_len=draft_len, num_chains=num_chains)
        tokens, num_drafted = jax.vmap(lookup)(context.tokens, context.lengths, context.num_wanted)
        return Proposal(tokens, num_drafted, probs=None), state

    def commit(self, state: None, lengths: Array) -> None:
        """Nothing to keep."""
        del state, lengths

    def _lookup(
        self, tokens: Array, length: Array, num_wanted: Array, *, draft_len: int, num_chains: int
    ) -> tuple[Array, Array]:
        """One row: ``tokens [C]`` → drafts ``[M, G]`` and their numbers ``[M]``."""
        end = jnp.arange(tokens.shape[0])  # an occurrence is named by the position after it
        run = jnp.zeros(tokens.shape, jnp.int32)
        is_equal = jnp.ones(tokens.shape, bool)
        for back in range(1, self.max_ngram + 1):
            last = tokens[jnp.maximum(length - back, 0)]
            shifted = jnp.roll(tokens, back)  # shifted[end] = tokens[end - back]
            is_equal &= (shifted == last) & (end >= back) & (length >= back)
            run += is_equal
        run = jnp.where((end < length) & (run >= self.min_ngram), run, 0)
        drafts, num_drafted = [], []
        for _ in range(num_chains):
            # The longest run wins; among equals the most recent.
            best = jnp.argmax(run * tokens.shape[0] + end)
            period = jnp.maximum(length - best, 1)
            drafts.append(tokens[jnp.clip(best + jnp.arange(draft_len) % period, 0, tokens.shape[0] - 1)])
            num_drafted.append(jnp.where(run[best] > 0, num_wanted, 0))
            run = jnp.where(tokens == tokens[best], 0, run)
        return jnp.stack(drafts).astype(jnp.int32), jnp.stack(num_drafted).astype(jnp.int32)
