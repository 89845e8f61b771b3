"""Where a step's tokens stand: the last committed one, and the drafts behind it."""

import jax.numpy as jnp

from bass_jax.decoding.state import SpecState
from bass_jax.typing import Array, Int


def last_tokens(state: SpecState) -> Int[Array, "B"]:
    """The last committed token of each row, which the next pass reads first."""
    return jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]


def input_positions(
    lengths: Int[Array, "B"], num_slots: int, num_inputs: Int[Array, "..."], capacity: int
) -> Int[Array, "... T"]:
    """Positions of a pass over the last committed token and drafts; what lies past `num_inputs` writes nothing.

    Args:
        lengths: committed tokens.
        num_slots: T.
        num_inputs: ``[B]``, or ``[B, M]`` for several chains.
        capacity: of the cache; the position that writes nothing.
    """
    slots = jnp.arange(num_slots)
    start = lengths.reshape(-1, *(1,) * num_inputs.ndim) - 1
    return jnp.where(slots < num_inputs[..., None], start + slots, capacity)


def with_drafts(state: SpecState, drafts: Int[Array, "B G"]) -> Int[Array, "B C"]:
    """The committed tokens with `drafts` behind them, for what looks at the tokens before a position."""
    rows = jnp.arange(drafts.shape[0])[:, None]
    columns = state.lengths[:, None] + jnp.arange(drafts.shape[1])
    return state.tokens.at[rows, columns].set(drafts, mode="drop")


def join_tokens(drafts: Int[Array, "B G"], num_accepted: Int[Array, "B"], next_token: Int[Array, "B"]) -> Array:
    """Puts `next_token` after the accepted drafts, ``[B, G + 1]``; what follows it means nothing."""
    slots = jnp.arange(drafts.shape[1] + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return jnp.where(slots < num_accepted[:, None], padded, next_token[:, None])
