"""Tokens and positions of a step: the last committed token and the drafts after it."""

import jax.numpy as jnp

from bass_jax.decoding.state import SpecState
from bass_jax.typing import Array, Int


def last_tokens(state: SpecState) -> Int[Array, "B"]:
    """Returns the last committed token of each row, the first input of the next pass."""
    return jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]


def input_positions(
    lengths: Int[Array, "B"], num_positions: int, num_inputs: Int[Array, "..."], capacity: int
) -> Int[Array, "... T"]:
    """Returns the positions of a pass over the last committed token and the drafts.

    Args:
        lengths: number of committed tokens.
        num_positions: T.
        num_inputs: ``[B]``, or ``[B, M]`` for several candidates; later positions are padding.
        capacity: of the cache; the position of padding.
    """
    offsets = jnp.arange(num_positions)
    start = lengths.reshape(-1, *(1,) * num_inputs.ndim) - 1  # [B, 1] or [B, 1, 1]
    return jnp.where(offsets < num_inputs[..., None], start + offsets, capacity)


def with_drafts(state: SpecState, drafts: Int[Array, "B G"]) -> Int[Array, "B C"]:
    """Returns the committed tokens with `drafts` after them, for the logits processors."""
    rows = jnp.arange(drafts.shape[0])[:, None]
    columns = state.lengths[:, None] + jnp.arange(drafts.shape[1])
    return state.tokens.at[rows, columns].set(drafts, mode="drop")


def join_tokens(drafts: Int[Array, "B G"], num_accepted: Int[Array, "B"], next_token: Int[Array, "B"]) -> Array:
    """Returns the accepted drafts and `next_token` after them, ``[B, G + 1]``; later entries are arbitrary."""
    offsets = jnp.arange(drafts.shape[1] + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return jnp.where(offsets < num_accepted[:, None], padded, next_token[:, None])
