"""A retrieval datastore: proposes the token that followed the last n tokens most often in the target's outputs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.typing import Array, Bool, Float, Int, UInt

_SPREAD, _MIX = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)


def suffix_hashes(tokens: Int[Array, "m n"] | Int[np.ndarray, "m n"]) -> UInt[Array, "m n"] | UInt[np.ndarray, "m n"]:
    """Hashes the last 1, 2, … n tokens to 32 bits, for JAX and NumPy arrays.

    With a million entries, one in 4,000 unknown contexts has the hash of another one. This can cause a wrong draft,
    which the target rejects.
    """
    tokens = tokens.astype(np.uint32)
    value = tokens[..., -1] * 0 + _SPREAD
    hashes = []
    for back in range(1, tokens.shape[-1] + 1):
        value = (value ^ tokens[..., -back]) * _SPREAD
        value = (value ^ (value >> 15)) * _MIX
        hashes.append(value ^ (value >> 13))
    stack = jnp.stack if isinstance(tokens, jax.Array) else np.stack
    return stack(hashes, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetrievalDrafter:
    """Looks up the longest known context, draft by draft. Deterministic and without a state.

    The context of a draft includes the drafts before it. A row ends at the first context that is unknown, or whose
    confidence is below `min_confidence`. `bass_jax.training.build_datastore` makes the arrays.

    Attributes:
        keys: ``[E]`` uint32, ascending, hashes of contexts of all lengths.
        tokens: ``[E]`` int, the token that followed most often.
        confidence: ``[E]`` uint8, the estimated probability that it follows again, times 255.
        max_ngram: longest context in tokens.
        min_ngram: shortest context in tokens, at least 1.
        min_confidence: smallest confidence of a draft, 0 to 1; traced.

    Source: He et al. 2023 (REST, arXiv 2311.08252). The probability is estimated by absolute discounting (Ney et al.
    1994).
    """

    keys: Any  # an array; `Any` because JAX rebuilds the tree with other objects
    tokens: Any
    confidence: Any
    max_ngram: int = dataclasses.field(metadata={"static": True})
    min_ngram: int = dataclasses.field(metadata={"static": True})
    min_confidence: Any = 0.0

    def init(self, tokens: Array, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del tokens, lengths

    def propose(self, state: None, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, None]:
        """Looks up `draft_len` tokens, one after the other."""
        del is_sampled
        rows = jnp.arange(context.lengths.shape[0])[:, None]
        columns = context.lengths[:, None] - self.max_ngram + jnp.arange(self.max_ngram)
        threshold = jnp.asarray(self.min_confidence, jnp.float32)
        if context.min_confidence is not None:
            threshold = jnp.maximum(threshold, context.min_confidence)

        def extend(carry, step):
            window, num_drafted = carry
            token, confidence, is_known = self._next(window, context.lengths + step)
            is_drafted = (num_drafted == step) & (step < context.num_wanted) & is_known & (confidence >= threshold)
            window = jnp.concatenate([window[:, 1:], token[:, None]], axis=1)
            return (window, num_drafted + is_drafted), (token, confidence)

        window = context.tokens[rows, jnp.maximum(columns, 0)].astype(jnp.int32)
        start = window, jnp.zeros_like(context.num_wanted)
        (_, num_drafted), found = jax.lax.scan(extend, start, jnp.arange(draft_len))
        tokens, confidence = (leaf.swapaxes(0, 1) for leaf in found)
        return Proposal(tokens, num_drafted, probs=None, confidence=confidence), state

    def commit(self, state: None, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del state, lengths

    def _next(
        self, window: Int[Array, "B n"], num_known: Int[Array, "B"]
    ) -> tuple[Int[Array, "B"], Float[Array, "B"], Bool[Array, "B"]]:
        """Returns the token after each row's window, its confidence, and whether a context of it is known."""
        lengths = jnp.arange(self.min_ngram, self.max_ngram + 1)
        hashes = suffix_hashes(window)[:, self.min_ngram - 1 :]
        index = jnp.minimum(jnp.searchsorted(self.keys, hashes), self.keys.shape[0] - 1)
        is_hit = (self.keys[index] == hashes) & (lengths <= num_known[:, None])
        longest = jnp.argmax(jnp.where(is_hit, lengths, 0), axis=1)[:, None]
        entry = jnp.take_along_axis(index, longest, axis=1)[:, 0]
        is_known = is_hit.any(axis=1)
        token = jnp.where(is_known, self.tokens[entry], 0).astype(jnp.int32)
        return token, jnp.where(is_known, self.confidence[entry] / 255, 0.0).astype(jnp.float32), is_known
