"""Fills a cache from prompts, a chunk at a time."""

import jax
import jax.numpy as jnp

from bass_jax.cache import KVCache
from bass_jax.models.model import Model
from bass_jax.typing import Array, Int

CHUNK = 64
"""Tokens per row and pass: the least prompt bucket, so that short prompts are not padded beyond it; it also bounds the
scores of attention to ``[B, N, 64, S]``."""


def extend_cache(model: Model, tokens: Int[Array, "B C"], num_tokens: Int[Array, "B"], cache: KVCache) -> KVCache:
    """Writes each row's first `num_tokens` tokens into an empty `cache`.

    Args:
        model: the model.
        tokens: ``[B, C]`` int32, right-padded.
        num_tokens: ``[B]`` int32, at most C; the rest of a row is never read.
        cache: empty, with a capacity of at least ``num_tokens.max()``.
    """
    chunk = min(CHUNK, tokens.shape[1])
    padding = -tokens.shape[1] % chunk
    tokens = jnp.pad(tokens, ((0, 0), (0, padding)))

    def read(index, cache):
        positions = index * chunk + jnp.arange(chunk)
        piece = jax.lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1)
        positions = jnp.where(positions < num_tokens[:, None], positions, cache.capacity)
        return model.features(piece, positions, cache)[1]

    num_chunks = -(-num_tokens.max() // chunk)
    return jax.lax.fori_loop(0, num_chunks, read, cache)
