"""The key-value cache: dense, per layer ``[B, K, S, H]``, one slot per absolute position.

Slot ``s`` of row ``b`` holds the keys and values of that row's token at position ``s``. A row has no
holes and no padding in front, so its valid slots are a prefix, and rolling back after a rejection is
lowering the row's length: nothing is moved or cleared, because no query reads past its own position.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.typing import Array, Float, Int
from kernels_pallas.attention.quantize import quantize_kv


class Int8KV(NamedTuple):
    """Keys or values of one layer as INT8, with a scale per token and head."""

    values: Array  # [B, K, S, H] int8
    scales: Array  # [B, K, S] float32

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, K, S, H)``."""
        return self.values.shape


class KVCache(NamedTuple):
    """Keys and values of every layer, `Int8KV` where the model's `cache_dtype` says so.

    A tuple of arrays per layer, rather than one stacked array, lets XLA update each in place and hand
    it to an attention kernel without slicing (and copying) it out.
    """

    keys: tuple[Array | Int8KV, ...]  # L x [B, K, S, H]
    values: tuple[Array | Int8KV, ...]  # L x [B, K, S, H]

    @property
    def capacity(self) -> int:
        """Slots per row, ``S``."""
        return self.keys[0].shape[2]


def allocate(num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype) -> KVCache:
    """Makes a zeroed cache.

    Zeroed and not uninitialised: a masked probability of 0 times an uninitialised NaN is NaN.
    """
    shape = (batch, num_kv_heads, capacity, head_dim)

    def empty():
        if dtype == jnp.int8:
            return Int8KV(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3], jnp.float32))
        return jnp.zeros(shape, dtype)

    return KVCache(*(tuple(empty() for _ in range(num_layers)) for _ in KVCache._fields))


def append(
    layer: Float[Array, "B K S H"] | Int8KV, new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B K S H"] | Int8KV:
    """Writes `new` at each row's `positions`; those at or past ``S`` are dropped.

    One in-place scatter when the cache is donated, and one more for the scales of an INT8 cache. `positions` must not
    repeat inside a row, except past the end.
    """
    if isinstance(layer, Int8KV):
        values, scales = quantize_kv(new)
        return Int8KV(_write(layer.values, values, positions), _write(layer.scales, scales, positions))
    return _write(layer, new.astype(layer.dtype), positions)


def _write(layer: Array, new: Array, positions: Int[Array, "B T"]) -> Array:
    rows = jnp.arange(layer.shape[0])[:, None, None]
    heads = jnp.arange(layer.shape[1])[None, :, None]
    # Distinct slots past the end: the promise of unique indices holds for dropped writes too.
    past_end = layer.shape[2] + jnp.arange(positions.shape[1])
    slots = jnp.where(positions < layer.shape[2], positions, past_end)[:, None, :]
    return layer.at[rows, heads, slots].set(new.swapaxes(1, 2), mode="drop", unique_indices=True)


def keep_chain(cache: KVCache, new: KVCache, chain: Int[Array, "B"], positions: Int[Array, "B T"]) -> KVCache:
    """Writes the tokens of one chain per row over those of whichever was written last.

    Args:
        cache: after a pass over several chains.
        new: keys and values of all chains, ``[B, M, T, K, H]`` per layer.
        chain: which to keep.
        positions: of its tokens; those at or past ``S`` are dropped.
    """
    rows = jnp.arange(chain.shape[0])

    def keep(layer, of_all):
        return append(layer, of_all[rows, chain], positions)

    return jax.tree.map(keep, cache, new, is_leaf=lambda node: isinstance(node, Int8KV))


def gather_rows(tree: Any, rows: Int[Array, "rows"]) -> Any:
    """Takes `rows` of every array of a cache, or of any state with rows first.

    Replicates a prompt over its samples, or compacts a batch.
    """
    return jax.tree.map(lambda array: jnp.take(array, rows, axis=0, mode="clip"), tree)
