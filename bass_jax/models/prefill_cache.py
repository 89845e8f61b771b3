"""Fills a cache from prompts, a chunk at a time."""

from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.models.flax_model import Model
from bass_jax.models.kv_cache import KVCache
from bass_jax.typing import Array, Float, Int

CHUNK = 64
"""Tokens per row and pass: the least prompt bucket, so that short prompts are not padded beyond it; it also bounds the
scores of attention to ``[B, N, 64, S]``."""


def extend_cache(
    model: Model,
    tokens: Int[Array, "B C"],
    num_tokens: Int[Array, "B"],
    cache: KVCache,
    hidden: Float[Array, "B C E"] | None = None,
) -> KVCache:
    """Writes each row's first `num_tokens` tokens into an empty `cache`.

    Args:
        model: the model.
        tokens: ``[B, C]`` int32, right-padded.
        num_tokens: ``[B]`` int32, at most C; the rest of a row is never read.
        cache: empty, with a capacity of at least ``num_tokens.max()``.
        hidden: ``[B, C, E]``, of a draft that reads hidden states: the target's at the token before each.
    """
    return _extend(model, tokens, num_tokens, cache, hidden, keeps_hidden_states=False)[0]


def extend_with_hidden_states(
    model: Model, tokens: Int[Array, "B C"], num_tokens: Int[Array, "B"], cache: KVCache
) -> tuple[KVCache, Float[Array, "B C D"]]:
    """`extend_cache` that also returns the hidden states at those tokens; what lies past them means nothing."""
    return _extend(model, tokens, num_tokens, cache, None, keeps_hidden_states=True)


def _extend(model: Model, tokens, num_tokens, cache: KVCache, hidden, keeps_hidden_states: bool) -> tuple[KVCache, Any]:
    num_rows, capacity = tokens.shape
    size = min(CHUNK, capacity)
    padding = ((0, 0), (0, -capacity % size))
    tokens = jnp.pad(tokens, padding)
    hidden = None if hidden is None else jnp.pad(hidden, (*padding, (0, 0)))
    shape = (num_rows, tokens.shape[1], model.config.width)
    kept = jnp.zeros(shape, model.config.dtype) if keeps_hidden_states else None

    def read(index, carry):
        cache, kept = carry
        positions = index * size + jnp.arange(size)
        chunk, own = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * size, size, axis=1), (tokens, hidden)
        )
        positions = jnp.where(positions < num_tokens[:, None], positions, cache.capacity)
        hidden_states, cache = model.hidden_states(chunk, positions, cache, own)
        if kept is not None:
            kept = jax.lax.dynamic_update_slice_in_dim(kept, hidden_states, index * size, axis=1)
        return cache, kept

    num_chunks = -(-num_tokens.max() // size)
    cache, kept = jax.lax.fori_loop(0, num_chunks, read, (cache, kept))
    return cache, None if kept is None else kept[:, :capacity]
