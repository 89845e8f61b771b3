"""Suffix decoding: proposes the most frequent continuation of the last tokens; counts decide how far to draft."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.runtime.checks import check_integer, check_number
from bass_jax.typing import Array, Float, Int

MATCHES = (1, 2, 4, 8, 16, 32)
"""The lengths of suffixes that are looked up, in tokens."""

MAX_OCCURRENCES = 64
"""So many occurrences are followed: those that match longest, of equal ones the last in the text."""

COARSE_MATCH = 8
"""Occurrences are chosen by at most so many matched tokens, because each is a pass over the text."""

MAX_SHARED_TOKENS = 2**20
"""The largest buffer of finished requests; the score of an occurrence is a float32 that has to be exact."""


class FinishedText(NamedTuple):
    """A ring buffer of the texts of finished requests."""

    tokens: Array  # [S] int32; -1 after each text and where nothing was written
    end: Array  # [] int32, the slot of the next token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SuffixDrafter:
    """Follows the most frequent continuation of a suffix of the text. Deterministic and without a state per row.

    For every length in `MATCHES`, the occurrences of the suffix in the text are followed token by token. A draft is the
    token that most of the remaining occurrences agree on, and its probability is their share. The row takes the suffix
    whose drafts have the largest expected number of accepted tokens, the sum of the products of these shares.

    By default the search reads the committed tokens of the row, so the text of one request is never proposed to
    another. With `finished_text` it also reads the last finished requests of the engine. There is no index to update,
    copy or roll back. A suffix tree would answer in fewer operations, but it is built one token after the other. The
    search is one pass over the text, and a vote of `MAX_OCCURRENCES` per draft.

    Attributes:
        max_factor: a suffix of n tokens is followed for at most ``max_factor * n`` drafts.
        min_probability: a row ends before the first draft whose probability, given that all drafts before it are
            accepted, is lower. The probability is the share above times those before it.
        finished_text: texts of finished requests, see `suffix_drafter`; None searches the row's own text only.

    Source: Oliaro et al. 2024 (SuffixDecoding, arXiv 2411.04975).
    """

    max_factor: int = dataclasses.field(default=2, metadata={"static": True})
    min_probability: float = dataclasses.field(default=0.1, metadata={"static": True})
    finished_text: Any = None  # a `FinishedText` or None; `Any` because JAX rebuilds the tree with other objects

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

    def remember(self, tokens: Array, length: Array) -> FinishedText:
        """Returns `finished_text` with the text ``tokens[:length]``, in place of the oldest tokens."""
        ring, size, slots = self.finished_text, self.finished_text.tokens.shape[0], jnp.arange(tokens.shape[0] + 1)
        text = jnp.where(slots < length, jnp.append(tokens, -1), -1)
        is_kept = (slots <= length) & (slots > length - size)
        columns = jnp.where(is_kept, (ring.end + slots) % size, size)
        return FinishedText(ring.tokens.at[columns].set(text, mode="drop"), (ring.end + length + 1) % size)

    def with_finished_text(self, finished_text: FinishedText) -> "SuffixDrafter":
        """Returns the drafter that searches `finished_text`."""
        return dataclasses.replace(self, finished_text=finished_text)

    def _search(
        self, tokens: Int[Array, "C"], length: Int[Array, ""], draft_len: int
    ) -> tuple[Int[Array, "G"], Int[Array, ""], Float[Array, "G"]]:
        """Returns the drafts of one row, their number, and the share of each."""
        own = jnp.where(jnp.arange(tokens.shape[0]) < length, tokens, -1)
        if self.finished_text is not None:  # The -1 keeps a text at the end of the buffer apart from the row's.
            own = jnp.concatenate([self.finished_text.tokens, jnp.full(1, -1, own.dtype), own])
        matched, continuations = occurrences(own, last_tokens(tokens, length), draft_len)
        steps = jnp.arange(draft_len)

        def follow(num_matched):
            def draft(is_followed, following):
                is_followed &= following >= 0  # An occurrence that ends says nothing about the next token.
                agrees = is_followed & (following == following[:, None])
                counts = jnp.where(is_followed, agrees.sum(axis=1), 0)
                best = counts.argmax()
                total = jnp.maximum(is_followed.sum(), 1)
                return agrees[best], (jnp.maximum(following[best], 0), counts[best] / total)

            _, (drafts, shares) = jax.lax.scan(draft, matched >= num_matched, continuations.T)
            probabilities = jnp.cumprod(shares)
            is_drafted = (probabilities > 0) & (probabilities >= self.min_probability)
            is_drafted = jnp.cumprod(is_drafted & (steps < self.max_factor * num_matched))
            return drafts, is_drafted.sum(), shares, (probabilities * is_drafted).sum()

        drafts, num_drafted, shares, expected = jax.vmap(follow)(jnp.asarray(MATCHES))
        best = expected.shape[0] - 1 - expected[::-1].argmax()  # Of equally good suffixes, the longest.
        return drafts[best].astype(jnp.int32), num_drafted[best], shares[best].astype(jnp.float32)


def suffix_drafter(max_factor: int = 2, min_probability: float = 0.1, shared_tokens: int = 0) -> SuffixDrafter:
    """Returns a drafter that searches the row's own text, and the last finished requests if there is room for them.

    Args:
        max_factor: see `SuffixDrafter`.
        min_probability: see `SuffixDrafter`.
        shared_tokens: S, the room for prompts and outputs of finished requests in tokens, up to `MAX_SHARED_TOKENS`.
            All requests of an engine then share them: the time of a request can show that another one contained the
            same text, and the sampled tokens of a seed depend on what finished before, unless the rule is
            ``"shared_noise"``. 0 keeps requests apart.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    check_integer("shared_tokens", shared_tokens, 0, MAX_SHARED_TOKENS)
    if shared_tokens == 0:
        return SuffixDrafter(max_factor, min_probability)
    empty = FinishedText(jnp.full(shared_tokens, -1, jnp.int32), jnp.int32(0))
    return SuffixDrafter(max_factor, min_probability, empty)


def last_tokens(tokens: Int[Array, "C"], length: Int[Array, ""]) -> Int[Array, "L"]:
    """Returns the last ``max(MATCHES)`` tokens of a text, the last one first; -2 before its beginning."""
    positions = length - 1 - jnp.arange(max(MATCHES))
    return jnp.where(positions >= 0, tokens[jnp.maximum(positions, 0)], -2)


def occurrences(
    text: Int[Array, "N"], last: Int[Array, "L"], draft_len: int
) -> tuple[Int[Array, "K"], Int[Array, "K G"]]:
    """Finds where the tokens `last` occur in `text`, longest matches first.

    Args:
        text: tokens, and -1 between texts.
        last: the tokens to look up, the last one first.
        draft_len: G.

    Returns:
        How many of `last` precede each occurrence, 0 for none; and the next tokens, -1 past the end of a text.
    """
    num, size = last.shape[0], text.shape[0]
    padded = jnp.pad(text, (num, draft_len), constant_values=-1)
    is_equal, matched = text >= 0, jnp.zeros(size, jnp.int32)
    for back in range(COARSE_MATCH):  # Unrolled, so that XLA makes one pass of it.
        start = num - 1 - back
        is_equal &= padded[start : start + size] == last[back]
        matched += is_equal
    # As float32, for which top_k on a CPU is four times as fast as for integers.
    scores = jnp.where(matched > 0, matched * size + jnp.arange(size), -1).astype(jnp.float32)
    best, ends = jax.lax.top_k(scores, min(MAX_OCCURRENCES, size))
    before = padded[num + ends[:, None] - 1 - jnp.arange(num)]
    matched = jnp.cumprod(before == last, axis=1).sum(axis=1)
    return jnp.where(best >= 0, matched, 0), padded[num + ends[:, None] + jnp.arange(draft_len)]
