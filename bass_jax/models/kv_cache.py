"""The key-value cache: dense, per layer ``[B, K, S, H]``, or in pages; one slot per absolute position.

Slot ``s`` of row ``b`` holds the keys and values of that row's token at position ``s``. A row has no
holes and no padding in front, so its valid slots are a prefix, and rolling back after a rejection is
lowering the row's length: nothing is moved or cleared, because no query reads past its own position.

In pages, the slots of a row lie in stretches that a table names, and rows that will grow long hold more of them.
"""

from collections.abc import Sequence
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


class PagedKV(NamedTuple):
    """Keys or values of one layer in pages that all rows share, and which of them are whose."""

    pages: Array  # [P, K, page, H]
    tables: Array  # [B, M] int32, pages of each row in order; P or more where it has none

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, K, M * page, H)``, as if it were dense."""
        _, num_heads, page_size, head_dim = self.pages.shape
        return self.tables.shape[0], num_heads, self.tables.shape[1] * page_size, head_dim


class PagedCache(NamedTuple):
    """Keys and values of every layer in pages; a row's table is one for all layers.

    Rows come and go by their tables alone: no keys or values are moved. What another row has left in a page is never
    used, whatever bits it is.
    """

    keys: tuple[Array, ...]  # L x [P, K, page, H]
    values: tuple[Array, ...]  # L x [P, K, page, H]
    tables: Array  # [B, M] int32

    @property
    def capacity(self) -> int:
        """Slots that a row's table has room for, ``S = M * page``."""
        return self.tables.shape[1] * self.keys[0].shape[2]


def layers_of(cache: KVCache | PagedCache) -> tuple[tuple, tuple]:
    """Keys and values per layer, each with all that is needed to read and write it."""
    if isinstance(cache, PagedCache):
        keys, values = (tuple(PagedKV(pages, cache.tables) for pages in side) for side in cache[:2])
        return keys, values
    return cache.keys, cache.values


def with_layers(cache: KVCache | PagedCache | None, keys: tuple, values: tuple) -> KVCache | PagedCache:
    """The reverse of `layers_of`."""
    if isinstance(cache, PagedCache):
        return cache._replace(keys=tuple(one.pages for one in keys), values=tuple(one.pages for one in values))
    return KVCache(keys, values)


def allocate(heads: Sequence[tuple[int, int]], batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """Makes a zeroed cache. An uninitialized one could hold NaN, and a masked probability of 0 times NaN is NaN.

    Args:
        heads: of each layer, the number of key-value heads and their size.
        batch: rows.
        capacity: slots per row.
        dtype: of keys and values.
    """

    def empty(num_kv_heads, head_dim):
        shape = (batch, num_kv_heads, capacity, head_dim)
        if dtype == jnp.int8:
            return Int8KV(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3], jnp.float32))
        return jnp.zeros(shape, dtype)

    return KVCache(*(tuple(empty(*one) for one in heads) for _ in KVCache._fields))


def append(
    layer: Float[Array, "B K S H"] | Int8KV | PagedKV, new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B K S H"] | Int8KV | PagedKV:
    """Writes `new` at each row's `positions`; those at or past ``S`` are dropped.

    One in-place scatter when the cache is donated, and one more for the scales of an INT8 cache. `positions` must not
    repeat inside a row, except past the end.
    """
    if isinstance(layer, Int8KV):
        values, scales = quantize_kv(new)
        return Int8KV(_write(layer.values, values, positions), _write(layer.scales, scales, positions))
    if isinstance(layer, PagedKV):
        return layer._replace(pages=_write_pages(layer, new.astype(layer.pages.dtype), positions))
    return _write(layer, new.astype(layer.dtype), positions)


def _write(layer: Array, new: Array, positions: Int[Array, "B T"]) -> Array:
    rows = jnp.arange(layer.shape[0])[:, None, None]
    heads = jnp.arange(layer.shape[1])[None, :, None]
    # Distinct slots past the end: the promise of unique indices holds for dropped writes too.
    past_end = layer.shape[2] + jnp.arange(positions.shape[1])
    slots = jnp.where(positions < layer.shape[2], positions, past_end)[:, None, :]
    return layer.at[rows, heads, slots].set(new.swapaxes(1, 2), mode="drop", unique_indices=True)


def _write_pages(layer: PagedKV, new: Array, positions: Int[Array, "B T"]) -> Array:
    num_pages, num_heads, page_size, _ = layer.pages.shape
    num_rows, num_tokens = positions.shape
    stretch = jnp.minimum(positions // page_size, layer.tables.shape[1] - 1)
    pages = jnp.take_along_axis(layer.tables, stretch, axis=1)
    is_dropped = (positions >= layer.shape[2]) | (pages >= num_pages)
    # Distinct places past the end: the promise of unique indices holds for dropped writes too.
    apart = jnp.arange(num_rows * num_tokens, dtype=jnp.int32).reshape(num_rows, num_tokens)
    pages = jnp.where(is_dropped, num_pages + apart, pages)[:, None, :]
    heads = jnp.arange(num_heads)[None, :, None]
    slots = (positions % page_size)[:, None, :]
    return layer.pages.at[pages, heads, slots].set(new.swapaxes(1, 2), mode="drop", unique_indices=True)


def keep_candidate(cache: KVCache, new: KVCache, candidate: Int[Array, "B"], positions: Int[Array, "B T"]) -> KVCache:
    """Writes the tokens of one chain per row over those of whichever was written last.

    Args:
        cache: after a pass over several chains.
        new: keys and values of all chains, ``[B, M, T, K, H]`` per layer.
        candidate: which to keep.
        positions: of its tokens; those at or past ``S`` are dropped.
    """
    rows = jnp.arange(candidate.shape[0])

    def keep(layer, of_all):
        return append(layer, of_all[rows, candidate], positions)

    return jax.tree.map(keep, cache, new, is_leaf=lambda node: isinstance(node, Int8KV))


def gather_rows(tree: Any, rows: Int[Array, "rows"]) -> Any:
    """Takes `rows` of every array of a cache, or of any state with rows first.

    Replicates a prompt over its samples, or compacts a batch. Of a paged cache the tables alone move.
    """

    def take(leaf):
        if isinstance(leaf, PagedCache):
            return leaf._replace(tables=jnp.take(leaf.tables, rows, axis=0, mode="clip"))
        return jnp.take(leaf, rows, axis=0, mode="clip")

    return jax.tree.map(take, tree, is_leaf=is_paged)


def is_paged(node: Any) -> bool:
    """Whether a node of a state is a paged cache."""
    return isinstance(node, PagedCache)


def paged(tree: Any, num_pages: int, page_size: int, tables: Int[Array, "B M"]) -> Any:
    """Makes an empty paged cache of every dense one in `tree`, which gives the shapes.

    Args:
        tree: with dense caches.
        num_pages: P; 0 for caches that are lent their pages, see `with_pages`.
        page_size: slots per page.
        tables: of the rows.
    """

    def empty(node):
        if not isinstance(node, KVCache):
            return node
        if isinstance(node.keys[0], Int8KV):
            raise ValueError("cache_dtype='int8': expected None, because an INT8 cache has no pages")

        def pages(layers):
            if num_pages == 0:
                return ()
            return tuple(jnp.zeros((num_pages, one.shape[1], page_size, one.shape[3]), one.dtype) for one in layers)

        return PagedCache(pages(node.keys), pages(node.values), tables)

    return jax.tree.map(empty, tree, is_leaf=lambda node: isinstance(node, KVCache))


def pages_of(tree: Any) -> tuple[tuple[Any, Any], ...]:
    """Keys and values of every paged cache in `tree`, in order; () where there are none."""
    nodes = jax.tree.leaves(tree, is_leaf=is_paged)
    return tuple((node.keys, node.values) for node in nodes if is_paged(node))


def with_pages(tree: Any, pages: tuple[tuple[Any, Any], ...] | None) -> Any:
    """Puts `pages_of` another tree into the paged caches of `tree`; None takes them out."""
    rest = iter(pages or ())

    def put(node):
        if not is_paged(node):
            return node
        keys, values = ((), ()) if pages is None else next(rest)
        return node._replace(keys=keys, values=values)

    return jax.tree.map(put, tree, is_leaf=is_paged)
