"""A profile with simple numbers, for tests that need one."""

import jax.numpy as jnp
import numpy as np

from bass_jax.cost_model import PassShape, Profile, TableModel


def made_up(slope: float = 0.1, rates=(0.7, 0.65, 0.6, 0.55)) -> Profile:
    """Returns a profile in which a pass of T tokens takes ``1 + slope * log2(2 b) * (T - 1)`` ms.

    A draft takes 0.1 ms, and catching up with 8 tokens 0.2 ms.
    """
    batches, widths, contexts = (np.array(grid, np.float32) for grid in ((1, 2, 4, 8, 16), (1, 2, 5, 9), (64, 512)))
    steepness = slope * np.log2(2 * batches)
    target = 1e-3 * (1 + steepness[:, None, None] * (widths[:, None] - 1) + 0 * contexts)
    flat = np.full((5, 2), 1e-4, np.float32)
    table = TableModel(*map(jnp.float32, (batches, widths, contexts, target, flat, flat, 2 * flat)))
    shape = PassShape(weight_bytes=1e8, cache_bytes=1e4, flops=5e7, attention_flops=1e4, num_layers=4.0)
    return Profile({"pair": "made up"}, table, tuple(rates), shape, None)
