"""A smaller model as drafter, with a cache of its own."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.cache import KVCache
from bass_jax.drafters.base import DraftContext, Proposal
from bass_jax.models.extend import extend_cache
from bass_jax.models.model import Model
from bass_jax.sampling.keys import gumbel
from bass_jax.sampling.law import draw, make_law
from bass_jax.typing import Array

CATCH_UP_CHUNK = 8
"""Tokens per row that one pass reads while the draft catches up."""


class ModelDrafterState(NamedTuple):
    """The draft's cache and how much of it is true."""

    cache: KVCache
    num_cached: Array  # [B] int32, leading committed tokens whose keys and values the cache holds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts autoregressively from `model`, sampling from its own law under the row's own controls.

    A round starts with a pass of two tokens: after a full acceptance the last draft was never fed back, so
    two committed tokens are missing from the cache, otherwise one. After steps without drafting more are
    missing; a loop reads those first, and it costs nothing when there are none.

    Attributes:
        model: the draft; with `output_ids` it proposes those tokens alone, and every other token has
            probability 0 in its law. Its vocabulary may be padded to another size than the target's.
        vocab_size: V of the target, the width of the law.
    """

    model: Model
    vocab_size: int = dataclasses.field(metadata={"static": True})

    def init(self, tokens: Array, lengths: Array) -> ModelDrafterState:
        """Prefills all but the last token of each row."""
        cache = self.model.init_cache(tokens.shape[0], tokens.shape[1])
        return ModelDrafterState(extend_cache(self.model, tokens, lengths - 1, cache), lengths - 1)

    def propose(
        self, state: ModelDrafterState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, ModelDrafterState]:
        """Runs as many passes as the row that wants most drafts; other rows write nothing in the rest.

        With ``context.min_confidence`` a row ends before its first draft whose law gives no token that much. The law
        comes before the draft, so this drops no draft for what it is.
        """
        state = self._catch_up(state, context)
        capacity = state.cache.capacity
        is_drafting = context.num_wanted > 0
        rows = jnp.arange(context.lengths.shape[0])

        # Pass 1: the one or two committed tokens that the cache lacks.
        positions = state.num_cached[:, None] + jnp.arange(2)
        is_missing = (positions < context.lengths[:, None]) & is_drafting[:, None]
        tokens = context.tokens[rows[:, None], jnp.minimum(positions, context.tokens.shape[1] - 1)]
        features, cache = self.model.features(tokens, jnp.where(is_missing, positions, capacity), state.cache)
        last = jnp.clip(context.lengths - 1 - state.num_cached, 0, 1)
        first, probs, confidence = self._choose(features[rows, last][:, None], context, 0, is_sampled)

        drafts = jnp.zeros((rows.shape[0], draft_len), jnp.int32).at[:, 0].set(first)
        laws = confidences = None
        if probs is not None:
            laws = jnp.zeros((rows.shape[0], draft_len, self.vocab_size), jnp.float32).at[:, 0].set(probs)
        if confidence is not None:
            confidences = jnp.zeros((rows.shape[0], draft_len), jnp.float32).at[:, 0].set(confidence)
        num_drafted = _until_unsure(context.num_wanted, 0, confidence, context)

        def extend(carry):
            step, num_drafted, drafts, laws, confidences, cache = carry
            position = jnp.where(step < num_drafted, context.lengths - 1 + step, capacity)[:, None]
            token = jax.lax.dynamic_index_in_dim(drafts, step - 1, axis=1)
            features, cache = self.model.features(token, position, cache)
            token, probs, confidence = self._choose(features, context, step, is_sampled)
            drafts = jax.lax.dynamic_update_index_in_dim(drafts, token, step, axis=1)
            if probs is not None:
                laws = jax.lax.dynamic_update_index_in_dim(laws, probs, step, axis=1)
            if confidence is not None:
                confidences = jax.lax.dynamic_update_index_in_dim(confidences, confidence, step, axis=1)
            num_drafted = _until_unsure(num_drafted, step, confidence, context)
            return step + 1, num_drafted, drafts, laws, confidences, cache

        start = (jnp.int32(1), num_drafted, drafts, laws, confidences, cache)
        _, num_drafted, drafts, laws, confidences, cache = jax.lax.while_loop(
            lambda carry: carry[0] < carry[1].max(), extend, start
        )
        num_cached = jnp.where(is_drafting, context.lengths + jnp.maximum(num_drafted, 1) - 1, state.num_cached)
        return Proposal(drafts, num_drafted, laws, confidences), ModelDrafterState(cache, num_cached)

    def commit(self, state: ModelDrafterState, lengths: Array) -> ModelDrafterState:
        """Keeps what was fed and accepted; the last committed token is never in the cache."""
        return state._replace(num_cached=jnp.minimum(state.num_cached, lengths - 1))

    def _choose(self, features, context: DraftContext, step, is_sampled: bool) -> tuple[Array, Any, Any]:
        """Draws one draft per row from features ``[B, 1, D]``; returns it, its law ``[B, V]`` and its confidence."""
        logits = self.model.logits(features)
        output_ids = self.model.output_ids
        if output_ids is None:  # Vocabularies padded to different sizes: what the target lacks is not proposed.
            logits = logits[..., : self.vocab_size]
        confidence = None
        if context.min_confidence is not None:  # Of the raw law: at temperature 0 the warped one is always sure.
            confidence = jax.nn.softmax(logits[:, 0].astype(jnp.float32)).max(axis=-1)
        if not is_sampled:
            column = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
            return (column if output_ids is None else output_ids[column]), None, confidence
        probs = make_law(logits, context.controls).probs[:, 0]
        if output_ids is not None:
            full = jnp.zeros((probs.shape[0], self.vocab_size), jnp.float32)
            probs = full.at[:, output_ids].set(probs, unique_indices=True)
        elif probs.shape[-1] < self.vocab_size:
            probs = jnp.pad(probs, ((0, 0), (0, self.vocab_size - probs.shape[-1])))
        return draw(probs, gumbel(context.keys[:, step], self.vocab_size)), probs, confidence

    def _catch_up(self, state: ModelDrafterState, context: DraftContext) -> ModelDrafterState:
        """Reads committed tokens until at most two are missing from every drafting row."""
        rows = jnp.arange(context.lengths.shape[0])[:, None]

        def num_behind(num_cached):
            return jnp.where(context.num_wanted > 0, context.lengths - 2 - num_cached, 0)

        def read(state):
            positions = state.num_cached[:, None] + jnp.arange(CATCH_UP_CHUNK)
            is_missing = jnp.arange(CATCH_UP_CHUNK) < num_behind(state.num_cached)[:, None]
            tokens = context.tokens[rows, jnp.minimum(positions, context.tokens.shape[1] - 1)]
            positions = jnp.where(is_missing, positions, state.cache.capacity)
            _, cache = self.model.features(tokens, positions, state.cache)
            return ModelDrafterState(cache, state.num_cached + is_missing.sum(axis=1, dtype=jnp.int32))

        return jax.lax.while_loop(lambda state: (num_behind(state.num_cached) > 0).any(), read, state)


def _until_unsure(num_drafted: Array, step: Array | int, confidence: Array | None, context: DraftContext) -> Array:
    """Cuts rows at draft `step` where its law is too flat."""
    if confidence is None or context.min_confidence is None:
        return num_drafted
    return jnp.where(confidence < context.min_confidence, jnp.minimum(num_drafted, step), num_drafted)
