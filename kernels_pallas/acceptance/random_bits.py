"""Random numbers one element at a time, in operations that kernels can lower.

`jax.random` does not lower inside a kernel, and a vector of V Gumbel numbers per row would have to be written to memory
and read again. Threefry is counter-based (Salmon et al. 2011): an element depends on the key and on its index only, so
each program computes the elements that it needs. The bits equal those of `jax.random` with
`jax_threefry_partitionable`, jax's default.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_EXPONENT_OF_ONE = np.uint32(0x3F800000)
_TINY = np.float32(np.finfo(np.float32).tiny)


def gives_bits_of(keys: jax.Array) -> bool:
    """Returns whether `jax.random` computes from `keys` the numbers that this module does."""
    return str(jax.random.key_impl(keys)) == "threefry2x32" and jax.config.jax_threefry_partitionable


def random_bits(key: tuple[jax.Array, jax.Array], index: jax.Array) -> jax.Array:
    """Returns element `index` of `jax.random.bits(key, (n,))`, for any n up to 2^32.

    Args:
        key: The two uint32 words of a threefry key; broadcast against `index`.
        index: `[...]` uint32.

    Returns:
        `[...]` uint32.
    """
    first, second = key
    words = (first, second, first ^ second ^ _PARITY)
    # The counter has 64 bits; its high word is 0 for vectors that fit in memory.
    high, low = jnp.zeros_like(index) + words[0], index + words[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high = high + low
            low = (low << np.uint32(rotation)) | (low >> np.uint32(32 - rotation))
            low = high ^ low
        high = high + words[(group + 1) % 3]
        low = low + words[(group + 2) % 3] + np.uint32(group + 1)
    return high ^ low


def uniform_at(key: tuple[jax.Array, jax.Array], index: jax.Array) -> jax.Array:
    """Returns element `index` of `1 - jax.random.uniform(key, (n,))`, float32 in (0, 1].

    The value is never 0, so a draft of target probability 0 is never accepted.
    """
    return 1.0 - _unit_interval(key, index)


def gumbel_at(key: tuple[jax.Array, jax.Array], index: jax.Array) -> jax.Array:
    """Returns element `index` of `jax.random.gumbel(key, (n,))`, float32."""
    open_interval = jnp.maximum(_unit_interval(key, index) * (np.float32(1.0) - _TINY) + _TINY, _TINY)
    return -jnp.log(-jnp.log(open_interval))


def _unit_interval(key: tuple[jax.Array, jax.Array], index: jax.Array) -> jax.Array:
    """Returns a number in [0, 1) whose mantissa consists of 23 random bits."""
    mantissa = random_bits(key, index) >> np.uint32(9)
    return lax.bitcast_convert_type(mantissa | _EXPONENT_OF_ONE, jnp.float32) - np.float32(1.0)
