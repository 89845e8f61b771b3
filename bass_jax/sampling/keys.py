"""Random numbers belong to a row: its own key, a counter, a role.

A row's noise never depends on its neighbors, its slot or the batch. Rejection rules count the row's
steps, because what they draw depends on later drafts and must not be met again in the next step; regular
decoding counts absolute positions, so that another way of reaching a position meets the same noise.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.runtime.checks import shown
from bass_jax.typing import Array, Float, Int, Key, UInt


class Role(enum.IntEnum):
    """What a draw is for; two roles never share a stream."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    POSITION = 3


def check_key(key: Any) -> Key[Array, ""]:
    """Returns `key`.

    Raises:
        ValueError: if it is not one key of `jax.random.key`.
    """
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        raise ValueError(f"key={shown(key)}: expected one key, as jax.random.key makes it")
    return key


def row_keys(key: Key[Array, ""], rows: UInt[Array, "B"]) -> Key[Array, "B"]:
    """Derives the key of each of `rows` from one; `key` is consumed."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def seed_keys(seeds: UInt[Array, "B"]) -> Key[Array, "B"]:
    """Makes each row's key from its own seed alone."""
    return jax.vmap(jax.random.key)(seeds)


def draw_keys(keys: Key[Array, "B"], counters: Int[Array, "B"], role: Role) -> Key[Array, "B"]:
    """Returns each row's key for one draw of `role` at its counter (a step or a position)."""
    counted = jax.vmap(jax.random.fold_in)(keys, counters.astype(jnp.uint32))
    return jax.vmap(lambda key: jax.random.fold_in(key, int(role)))(counted)


def step_draft_keys(keys: Key[Array, "B"], steps: Int[Array, "B"], num_drafts: int) -> Key[Array, "B G"]:
    """Returns each row's keys for the drafts of one step."""
    indices = jnp.arange(num_drafts, dtype=jnp.uint32)
    fold_in_each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(fold_in_each, in_axes=(0, None))(draw_keys(keys, steps, Role.DRAFT), indices)


def position_keys(keys: Key[Array, "B"], start: Int[Array, "B"], num_positions: int) -> Key[Array, "B T"]:
    """Returns each row's keys for the tokens at absolute positions from `start` on."""
    positions = start[:, None] + jnp.arange(num_positions, dtype=jnp.int32)
    return jax.vmap(draw_keys, in_axes=(None, 1, None), out_axes=1)(keys, positions, Role.POSITION)


def gumbel(keys: Key[Array, "B"], vocab_size: int) -> Float[Array, "B V"]:
    """Draws one Gumbel vector per row, float32."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys)


def uniform(keys: Key[Array, "B"], num: int) -> Float[Array, "B num"]:
    """Draws from (0, 1]: zero never comes, so that a draft of probability zero is never accepted."""
    return 1.0 - jax.vmap(lambda key: jax.random.uniform(key, (num,), jnp.float32))(keys)
