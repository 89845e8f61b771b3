"""Suffix decoding: proposes the most frequent continuation of the last tokens; counts decide how far to draft."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.runtime.checks import check_integer, check_number
from bass_jax.typing import Array, Float, Int

MATCHES = (1, 2, 4, 8, 16, 32)
"""The lengths of suffixes that are looked up, in tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SuffixDrafter:
    """Follows the most frequent continuation of a suffix of the text. Deterministic and without a state.

    For every length in `MATCHES`, all occurrences of the suffix in the text are followed token by token. A draft is the
    token that most of the remaining occurrences agree on, and its probability is their share. The row takes the suffix
    whose drafts have the largest expected number of accepted tokens, the sum of the products of these shares.

    The search reads the committed tokens of the row, so the text of one request is never proposed to another, and there
    is no index to update, copy or roll back. A suffix tree would answer in fewer operations, but it is built one token
    after the other, and the search is a few passes over ``[C]`` integers per draft.

    Attributes:
        max_factor: a suffix of n tokens is followed for at most ``max_factor * n`` drafts.
        min_probability: a row ends before the first draft whose probability, given that all drafts before it are
            accepted, is lower. The probability is the share above times those before it.

    Source: Oliaro et al. 2024 (SuffixDecoding, arXiv 2411.04975).
    """

    max_factor: int = dataclasses.field(default=2, metadata={"static": True})
    min_probability: float = dataclasses.field(default=0.1, metadata={"static": True})

    def __post_init__(self):
        check_integer("max_factor", self.max_factor, 1)
        if not 0 <= check_number("min_probability", self.min_probability) <= 1:
            raise ValueError(f"min_probability={self.min_probability}: expected 0 to 1")

    def init(self, tokens: Array, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del tokens, lengths

    def propose(self, state: None, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, None]:
        """Proposes the most frequent continuation; a row whose last token is new drafts nothing."""
        del is_sampled

        def search(tokens, length):
            return self._search(tokens, length, draft_len)

        tokens, num_drafted, confidence = jax.vmap(search)(context.tokens, context.lengths)
        if context.min_confidence is not None:
            is_confident = jnp.cumprod(confidence >= context.min_confidence[:, None], axis=1)
            num_drafted = jnp.minimum(num_drafted, is_confident.sum(axis=1))
        num_drafted = jnp.minimum(num_drafted, context.num_wanted).astype(jnp.int32)
        return Proposal(tokens, num_drafted, None, confidence), state

    def commit(self, state: None, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del state, lengths

    def _search(
        self, tokens: Int[Array, "C"], length: Int[Array, ""], draft_len: int
    ) -> tuple[Int[Array, "G"], Int[Array, ""], Float[Array, "G"]]:
        """Returns the drafts of one row, their number, and the share of each."""
        matched, ranks = match_lengths(tokens, length, max(MATCHES)), dense_ranks(tokens)
        steps = jnp.arange(draft_len)

        def follow(num_matched):
            def draft(is_followed, step):
                positions = jnp.minimum(jnp.arange(tokens.shape[0]) + step, tokens.shape[0] - 1)
                # An occurrence that reaches the end of the text says nothing about the next token.
                is_followed &= jnp.arange(tokens.shape[0]) + step < length
                counts = jnp.zeros(tokens.shape, jnp.int32).at[ranks[positions]].add(is_followed)
                best = counts.argmax()
                is_next = is_followed & (ranks[positions] == best)
                total = jnp.maximum(is_followed.sum(), 1)
                return is_next, (tokens[positions[is_next.argmax()]], counts[best] / total)

            _, (drafts, shares) = jax.lax.scan(draft, matched >= num_matched, steps)
            probabilities = jnp.cumprod(shares)
            is_drafted = (probabilities > 0) & (probabilities >= self.min_probability)
            is_drafted = jnp.cumprod(is_drafted & (steps < self.max_factor * num_matched))
            return drafts, is_drafted.sum(), shares, (probabilities * is_drafted).sum()

        drafts, num_drafted, shares, expected = jax.vmap(follow)(jnp.asarray(MATCHES))
        best = expected.shape[0] - 1 - expected[::-1].argmax()  # Of equally good suffixes, the longest.
        return drafts[best].astype(jnp.int32), num_drafted[best], shares[best].astype(jnp.float32)


def match_lengths(tokens: Int[Array, "C"], length: Int[Array, ""], limit: int) -> Int[Array, "C"]:
    """Returns for each position how many tokens before it equal the last ones of the text, at most `limit`.

    It is 0 from the end of the text on.
    """
    end = jnp.arange(tokens.shape[0])

    def extend(back, carry):
        is_equal, num = carry
        last = tokens[jnp.maximum(length - back, 0)]
        is_equal &= (jnp.roll(tokens, back) == last) & (end >= back) & (length >= back)
        return is_equal, num + is_equal

    start = end < length, jnp.zeros(tokens.shape, jnp.int32)
    return jax.lax.fori_loop(1, limit + 1, extend, start)[1]


def dense_ranks(tokens: Int[Array, "C"]) -> Int[Array, "C"]:
    """Returns a number below C for each token, the same for equal tokens."""
    order = tokens.argsort()
    is_new = jnp.diff(tokens[order], prepend=tokens[order][:1]) != 0
    return jnp.zeros(tokens.shape, jnp.int32).at[order].set(jnp.cumsum(is_new).astype(jnp.int32))
