"""The mode of a distribution: the place of its largest score."""

import jax.numpy as jnp

from bass_jax.typing import Array, Float, Int
from kernels_pallas.targets import current_target

_BLOCK = 128


def argmax(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Returns where the largest of the last axis is, the first of equals; any place where one is NaN.

    `jnp.argmax`, but for NaN. XLA for a CPU compares values and places one by one, of five rows of a vocabulary of
    49,152 for longer than a millisecond; so the largest of every block is found first, which it does several at a time.

    Args:
        scores: floating point.

    Returns:
        int32.
    """
    num_blocks = -(-scores.shape[-1] // _BLOCK)
    if num_blocks < 4 or current_target().platform != "cpu":
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    missing = num_blocks * _BLOCK - scores.shape[-1]
    if missing:
        widths = [(0, 0)] * (scores.ndim - 1) + [(0, missing)]
        scores = jnp.pad(scores, widths, constant_values=-jnp.inf)
    blocks = scores.reshape(*scores.shape[:-1], num_blocks, _BLOCK)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)
