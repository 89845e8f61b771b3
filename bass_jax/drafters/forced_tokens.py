"""Proposes the tokens that a row's grammar forces."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.sampling.grammar import forced_tokens
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForcedTokensDrafter:
    """Proposes the tokens that must follow by the row's grammar, such as the next key of a JSON schema.

    Deterministic and without a state. A row without a grammar, or whose grammar allows several texts, drafts nothing.
    As the first part of an `EnsembleDrafter`, it proposes forced tokens without a pass of the other parts, which
    propose the rest. See `bass_jax.sampling.Grammar`.
    """

    def init(self, tokens: Array, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del tokens, lengths

    def propose(self, state: None, context: DraftContext, draft_len: int, *, is_sampled: bool) -> tuple[Proposal, None]:
        """Proposes up to `draft_len` forced tokens per row, with confidence 1."""
        del is_sampled
        tokens, num = jnp.zeros((context.lengths.shape[0], draft_len), jnp.int32), jnp.zeros_like(context.lengths)
        arrays = context.processors.processor_arrays
        if arrays is not None and arrays.grammars is not None:
            grammars = jnp.where(context.num_wanted > 0, arrays.grammars, -1)
            tokens, num = forced_tokens(
                grammars, context.tokens, context.processors.prompt_lengths, context.lengths, draft_len
            )
        return Proposal(tokens, jnp.minimum(num, context.num_wanted), None, jnp.ones(tokens.shape, jnp.float32)), state

    def commit(self, state: None, lengths: Array) -> None:
        """Returns None: the drafter has no state."""
        del state, lengths
