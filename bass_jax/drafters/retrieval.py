"""An retrieval datastore: proposes what the target said most often after the last n tokens, whatever the prompt."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.typing import Array, Bool, Float, Int, UInt

_SPREAD, _MIX = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)


def suffix_hashes(tokens: Int[Array, "m n"] | Int[np.ndarray, "m n"]) -> UInt[Array, "m n"] | UInt[np.ndarray, "m n"]:
    """Hashes the last 1, 2, … n tokens, for arrays of jax and of NumPy alike.

    32 bits: of a million entries one in 4,000 unknown contexts meets a stranger's, which costs a draft and never
    exactness.
    """
    tokens = tokens.astype(np.uint32)
    found = tokens[..., -1] * 0 + _SPREAD
    hashes = []
    for back in range(1, tokens.shape[-1] + 1):
        found = (found ^ tokens[..., -back]) * _SPREAD
        found = (found ^ (found >> 15)) * _MIX
        hashes.append(found ^ (found >> 13))
    stack = jnp.stack if isinstance(tokens, jax.Array) else np.stack
    return stack(hashes, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetrievalDrafter:
    """Deterministic, no state; `bass_jax.training.build_datastore` makes its arrays from a target's outputs.

    Every draft looks the longest context up first and backs off to shorter ones; it is looked up behind the drafts
    before it. A row ends at the first context that is not known, or less sure than `min_confidence`.

    Attributes:
        keys: ``[E]`` uint32, ascending: hashes of contexts of all lengths.
        tokens: ``[E]`` int, the token that followed most often.
        confidence: ``[E]`` uint8, in 255ths: how often it will follow again, by the counts.
        max_ngram: longest context, in tokens.
        min_ngram: shortest context, at least 1.
        min_confidence: of a draft, 0 to 1; traced.

    Source: He et al. 2023 (arXiv 2311.08252), retrieval as draft; the estimate is absolute discounting (Ney et al.
    1994).
    """

    keys: Any  # arrays; anything while jax rebuilds the tree
    tokens: Any
    confidence: Any
    max_ngram: int = dataclasses.field(metadata={"static": True})
    min_ngram: int = dataclasses.field(metadata={"static": True})
    min_confidence: Any = 0.0

    def init(self, tokens: Array, lengths: Array) -> None:
        """Nothing to keep: the committed tokens are all it reads."""
        del tokens, lengths

    def propose(self, state: None, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, None]:
        """Looks `draft_len` tokens up, one behind the other."""
        del is_sampled
        rows = jnp.arange(context.lengths.shape[0])[:, None]
        columns = context.lengths[:, None] - self.max_ngram + jnp.arange(self.max_ngram)
        least = jnp.asarray(self.min_confidence, jnp.float32)
        if context.min_confidence is not None:
            least = jnp.maximum(least, context.min_confidence)

        def extend(carry, step):
            window, num_drafted = carry
            token, confidence, is_known = self._next(window, context.lengths + step)
            goes_on = (num_drafted == step) & (step < context.num_wanted) & is_known & (confidence >= least)
            window = jnp.concatenate([window[:, 1:], token[:, None]], axis=1)
            return (window, num_drafted + goes_on), (token, confidence)

        window = context.tokens[rows, jnp.maximum(columns, 0)].astype(jnp.int32)
        start = window, jnp.zeros_like(context.num_wanted)
        (_, num_drafted), found = jax.lax.scan(extend, start, jnp.arange(draft_len))
        tokens, confidence = (leaf.swapaxes(0, 1) for leaf in found)
        return Proposal(tokens, num_drafted, probs=None, confidence=confidence), state

    def commit(self, state: None, lengths: Array) -> None:
        """Nothing to keep."""
        del state, lengths

    def _next(
        self, window: Int[Array, "B n"], num_known: Int[Array, "B"]
    ) -> tuple[Int[Array, "B"], Float[Array, "B"], Bool[Array, "B"]]:
        """The token after each row's window, how sure it is, and whether any context of it is known."""
        lengths = jnp.arange(self.min_ngram, self.max_ngram + 1)
        hashes = suffix_hashes(window)[:, self.min_ngram - 1 :]
        index = jnp.minimum(jnp.searchsorted(self.keys, hashes), self.keys.shape[0] - 1)
        is_hit = (self.keys[index] == hashes) & (lengths <= num_known[:, None])
        longest = jnp.argmax(jnp.where(is_hit, lengths, 0), axis=1)[:, None]
        entry = jnp.take_along_axis(index, longest, axis=1)[:, 0]
        is_known = is_hit.any(axis=1)
        token = jnp.where(is_known, self.tokens[entry], 0).astype(jnp.int32)
        return token, jnp.where(is_known, self.confidence[entry] / 255, 0.0).astype(jnp.float32), is_known
