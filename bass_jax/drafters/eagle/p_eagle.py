"""P-EAGLE: an EAGLE-3 head that drafts all tokens of a step in one pass."""

import dataclasses

import jax
import jax.numpy as jnp

from bass_jax.drafters.autoregressive import choose_drafts, tokens_at
from bass_jax.drafters.eagle.drafter import EagleState, previous
from bass_jax.drafters.eagle.eagle3 import Eagle3Drafter, without_short_rows
from bass_jax.drafters.protocols import DraftContext, Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PEagleDrafter(Eagle3Drafter):
    """Drafts all tokens of a step in one pass of an EAGLE-3 head that was trained for it.

    The pass reads the committed tokens that the cache lacks, and after them a mask token with a learned hidden state
    for every further draft. Their keys and values are overwritten by the next pass. The distribution of a draft does
    not depend on the drafts before it.

    Attributes:
        model: an `Eagle3Model` whose head has a `mask_token_id`.
        vocab_size: V of the target.
        min_confidence: as in `ModelDrafter`.

    Source: P-EAGLE (parallel drafting with EAGLE), as in `speculators` 0.9.
    """

    def propose(
        self, state: EagleState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, EagleState]:
        """Drafts up to `draft_len` tokens per row in one pass."""
        context = without_short_rows(context)
        num_slots, num_columns = draft_len + 1, 2 * draft_len
        state = self._catch_up(state, context, num_slots)
        is_drafting, lengths = context.num_wanted > 0, context.lengths[:, None]
        positions = state.num_cached[:, None] + jnp.arange(num_columns)
        is_committed = positions < lengths
        num_masks = jnp.maximum(context.num_wanted - 1, 0)[:, None]
        is_read = (positions < lengths + num_masks) & is_drafting[:, None]
        tokens = jnp.where(is_committed, tokens_at(context, positions), self.model.head.mask_token_id)
        mask = self.model.projected_mask().astype(state.hidden.dtype)
        hidden = jnp.where(is_committed[..., None], previous(state.hidden, positions), mask)
        inputs = jnp.where(is_read, positions, state.cache.capacity)
        output = self.model.hidden_states(tokens, inputs, state.cache, hidden)
        last = jnp.clip(context.lengths - 1 - state.num_cached, 0, num_slots - 1)
        columns = jnp.minimum(last[:, None] + jnp.arange(draft_len), num_columns - 1)
        of_drafts = output.hidden[jnp.arange(last.shape[0])[:, None], columns]
        num_cached = jnp.where(is_drafting, context.lengths, state.num_cached)
        state = self._predict_last(
            state._replace(cache=output.cache, num_cached=num_cached), of_drafts[:, :1], is_drafting
        )
        return choose_drafts(self, of_drafts, context, is_sampled=is_sampled), state
