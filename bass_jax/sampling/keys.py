"""Random keys, each derived from a row's key, a counter and a role.

A row's random numbers do not depend on the other rows, on its slot or on the batch size. The counter is one of two:

* Rejection rules count the row's steps. A position can be drafted again in the next step, and must then get new random
  numbers.
* Regular decoding and the shared-noise rule count absolute positions, so that a position always gets the same random
  numbers.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.runtime import cpu_workarounds
from bass_jax.runtime.checks import shown
from bass_jax.typing import Array, Float, Int, Key, UInt


class Role(enum.IntEnum):
    """What a random number is used for. Each role has an independent stream."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    POSITION = 3


def check_key(key: Any) -> Key[Array, ""]:
    """Returns `key`.

    Raises:
        ValueError: if it is not a single key as `jax.random.key` returns it.
    """
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        raise ValueError(f"key={shown(key)}: expected one key, as jax.random.key makes it")
    return key


def row_keys(key: Key[Array, ""], rows: UInt[Array, "B"]) -> Key[Array, "B"]:
    """Derives one key per row from `key`, which is consumed."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def seed_keys(seeds: UInt[Array, "B"]) -> Key[Array, "B"]:
    """Returns each row's key, made from the row's own seed."""
    return jax.vmap(jax.random.key)(seeds)


def draw_keys(keys: Key[Array, "B"], counters: Int[Array, "B"], role: Role) -> Key[Array, "B"]:
    """Returns each row's key for `role` at its counter, which is a step or a position."""
    counted = jax.vmap(jax.random.fold_in)(keys, counters.astype(jnp.uint32))
    return jax.vmap(lambda key: jax.random.fold_in(key, int(role)))(counted)


def step_draft_keys(keys: Key[Array, "B"], steps: Int[Array, "B"], num_drafts: int) -> Key[Array, "B G"]:
    """Returns each row's keys for the drafts of one step."""
    indices = jnp.arange(num_drafts, dtype=jnp.uint32)
    fold_in_each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(fold_in_each, in_axes=(0, None))(draw_keys(keys, steps, Role.DRAFT), indices)


def position_keys(keys: Key[Array, "B"], start: Int[Array, "B"], num_positions: int) -> Key[Array, "B T"]:
    """Returns each row's keys for the tokens at the absolute positions from `start`."""
    positions = start[:, None] + jnp.arange(num_positions, dtype=jnp.int32)
    return jax.vmap(draw_keys, in_axes=(None, 1, None), out_axes=1)(keys, positions, Role.POSITION)


def gumbel(keys: Key[Array, "B"], vocab_size: int) -> Float[Array, "B V"]:
    """Samples one vector of Gumbel noise per row, float32."""
    return cpu_workarounds.gumbel(keys, vocab_size)


def uniform(keys: Key[Array, "B"], num: int) -> Float[Array, "B num"]:
    """Samples from (0, 1]. Zero is excluded so that a draft of probability zero is never accepted."""
    return 1.0 - jax.vmap(lambda key: jax.random.uniform(key, (num,), jnp.float32))(keys)
