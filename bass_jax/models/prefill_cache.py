"""Reads prompts in chunks."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from bass_jax.typing import Array, Int

CHUNK = 64
"""Tokens per row that one pass reads. It is the smallest prompt bucket, so that short prompts are not padded beyond it,
and it bounds the attention scores to ``[B, N, 64, S]``."""

Carry = TypeVar("Carry")


def read_in_chunks(
    read: Callable[[Carry, Array, Array], Carry],
    carry: Carry,
    tokens: Int[Array, "B C"],
    num_tokens: Int[Array, "B"],
    capacity: int,
) -> Carry:
    """Reads each row's first `num_tokens` tokens, as many chunks as the longest row needs.

    Args:
        read: ``(carry, tokens [B, 64], positions [B, 64]) -> carry``; entries at the position `capacity` are padding.
        carry: a cache, for example.
        tokens: ``[B, C]`` int32, padded on the right.
        num_tokens: ``[B]`` int32, at most C.
        capacity: of the cache; the position that writes nothing.
    """
    size = min(CHUNK, tokens.shape[1])
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % size)))

    def read_one(index, carry):
        positions = index * size + jnp.arange(size)
        chunk = jax.lax.dynamic_slice_in_dim(tokens, index * size, size, axis=1)
        return read(carry, chunk, jnp.where(positions < num_tokens[:, None], positions, capacity))

    return jax.lax.fori_loop(0, -(-num_tokens.max() // size), read_one, carry)
