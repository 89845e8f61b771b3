"""The key-value cache: dense, ``[B, K, S, H]`` per layer, or paged.

Slot ``s`` of a row holds the keys and values of the row's token at position ``s``. Rows have no holes and no padding in
front, so the valid slots are a prefix. A rollback after a rejection only lowers the row's length: nothing is moved or
cleared, because no query reads past its own position. The values of latent attention are lanes of its keys, so that its
arrays of values have ``H = 0``.

In a paged cache the slots of a row are in pages that a table lists. Longer rows have more pages.

Recurrent layers have a state per row instead, in paged caches too; see `bass_jax.models.recurrent_state`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.models.recurrent_state import PendingState, RecurrentState, commit_state, keep_candidate_state
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


class PagedKV(NamedTuple):
    """Keys or values of one layer in pages that all rows share, and the rows' tables."""

    pages: Array | Int8KV  # [P, K, page, H]
    tables: Array  # [B, M] int32, the pages of each row in order; P or more for no page

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, K, M * page, H)``, the shape of an equivalent dense array."""
        _, num_heads, page_size, head_dim = self.pages.shape
        return self.tables.shape[0], num_heads, self.tables.shape[1] * page_size, head_dim


LayerKV = Array | Int8KV | PagedKV
"""Keys or values of one layer: dense in the model's dtype ``[B, K, S, H]``, dense INT8, or pages of either."""


class KVCache(NamedTuple):
    """Keys and values of every layer with attention, `Int8KV` if the model's `cache_dtype` is INT8, and other states.

    A tuple of arrays per layer instead of one stacked array lets XLA update each in place, and pass it to an attention
    kernel without a copy.
    """

    keys: tuple[Array | Int8KV, ...]  # per layer with attention [B, K, S, H]
    values: tuple[Array | Int8KV, ...]  # per layer with attention [B, K, S, H]
    states: tuple[RecurrentState | PendingState, ...] = ()  # per recurrent layer; pending between a pass and its commit

    @property
    def capacity(self) -> int:
        """S, the number of slots per row."""
        return self.keys[0].shape[2]


class PagedCache(NamedTuple):
    """Keys and values of every layer with attention in pages; a row has one table for all layers.

    Rows are added and removed by changing tables, without moving keys or values. What another row left in a page is
    never used, even if it is NaN.
    """

    keys: tuple[Array | Int8KV, ...]  # per layer with attention [P, K, page, H]
    values: tuple[Array | Int8KV, ...]  # per layer with attention [P, K, page, H]
    tables: Array  # [B, M] int32
    states: tuple[RecurrentState | PendingState, ...] = ()  # of the rows; see `KVCache.states`

    @property
    def capacity(self) -> int:
        """``S = M * page``, the number of slots per row."""
        return self.tables.shape[1] * self.keys[0].shape[2]


def split_layers(cache: KVCache | PagedCache) -> tuple[tuple[LayerKV, ...], tuple[LayerKV, ...]]:
    """Returns the keys and the values of each layer with attention."""
    if isinstance(cache, PagedCache):
        keys, values = (tuple(PagedKV(pages, cache.tables) for pages in side) for side in cache[:2])
        return keys, values
    return cache.keys, cache.values


def join_layers(
    cache: KVCache | PagedCache | None, keys: tuple, values: tuple, states: tuple = ()
) -> KVCache | PagedCache:
    """Inverts `split_layers`; `cache` is the cache that was split, or None for a new dense one."""
    if isinstance(cache, PagedCache):
        keys, values = (tuple(one.pages for one in side) for side in (keys, values))
        return PagedCache(keys, values, cache.tables, states)
    return KVCache(keys, values, states)


def commit(cache: KVCache | PagedCache, num_kept: Int[Array, "B"]) -> KVCache | PagedCache:
    """Keeps the first `num_kept` tokens of the last pass in the states of recurrent layers."""
    return cache._replace(states=tuple(commit_state(one, num_kept) for one in _pending(cache)))


def _pending(cache: KVCache | PagedCache) -> list[PendingState]:
    """Returns the states after a pass.

    Raises:
        ValueError: if the pass was committed.
    """
    pending = [one for one in cache.states if isinstance(one, PendingState)]
    if len(pending) < len(cache.states):
        raise ValueError("cache: expected the cache of a pass, which is committed once")
    return pending


def allocate(heads: Sequence[tuple[int, int, int]], batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """Returns a cache of zeros. Uninitialized memory could hold NaN, and a masked weight of 0 times NaN is NaN.

    Args:
        heads: the number of key-value heads of each layer, and the sizes of their keys and values.
        batch: number of rows.
        capacity: slots per row.
        dtype: of keys and values.
    """

    def empty(num_kv_heads, head_dim):
        return _zeros((batch, num_kv_heads, capacity, head_dim), is_int8=dtype == jnp.int8, dtype=dtype)

    keys = tuple(empty(num_kv_heads, key_dim) for num_kv_heads, key_dim, _ in heads)
    return KVCache(keys, tuple(empty(num_kv_heads, value_dim) for num_kv_heads, _, value_dim in heads))


def _zeros(shape: tuple[int, ...], *, is_int8: bool, dtype: jnp.dtype) -> Array | Int8KV:
    if is_int8:
        return Int8KV(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3], jnp.float32))
    return jnp.zeros(shape, dtype)


def append(layer: LayerKV, new: Float[Array, "B T K H"], positions: Int[Array, "B T"]) -> LayerKV:
    """Writes `new` to each row's `positions`; those at or past ``S`` are dropped.

    If the cache is donated this is one in-place scatter, and one more for the scales of an INT8 cache. Positions below
    ``S`` must be distinct within a row.
    """
    if new.shape[-1] == 0:
        return layer
    is_paged = isinstance(layer, PagedKV)
    old = layer.pages if is_paged else layer
    write = functools.partial(_write_pages, tables=layer.tables) if is_paged else _write
    if isinstance(old, Int8KV):
        values, scales = quantize_kv(new)
        written = Int8KV(write(old.values, values, positions), write(old.scales, scales, positions))
    else:
        written = write(old, new.astype(old.dtype), positions)
    return layer._replace(pages=written) if is_paged else written


def _write(layer: Array, new: Array, positions: Int[Array, "B T"]) -> Array:
    rows = jnp.arange(layer.shape[0])[:, None, None]
    heads = jnp.arange(layer.shape[1])[None, :, None]
    # Dropped writes need distinct slots past the end, because unique indices are promised for them too.
    past_end = layer.shape[2] + jnp.arange(positions.shape[1])
    slots = jnp.where(positions < layer.shape[2], positions, past_end)[:, None, :]
    return layer.at[rows, heads, slots].set(
        new.swapaxes(1, 2), mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def _write_pages(layer: Array, new: Array, positions: Int[Array, "B T"], *, tables: Int[Array, "B M"]) -> Array:
    num_pages, num_heads, page_size = layer.shape[:3]
    num_rows, num_tokens = positions.shape
    entries = jnp.minimum(positions // page_size, tables.shape[1] - 1)
    pages = jnp.take_along_axis(tables, entries, axis=1)
    is_dropped = (positions >= tables.shape[1] * page_size) | (pages >= num_pages)
    # Dropped writes need distinct pages past the end, because unique indices are promised for them too.
    past_end = num_pages + jnp.arange(num_rows * num_tokens, dtype=jnp.int32).reshape(num_rows, num_tokens)
    pages = jnp.where(is_dropped, past_end, pages)[:, None, :]
    heads = jnp.arange(num_heads)[None, :, None]
    slots = (positions % page_size)[:, None, :]
    return layer.at[pages, heads, slots].set(new.swapaxes(1, 2), mode="drop", unique_indices=True)


def keep_candidate(
    cache: KVCache | PagedCache, new: KVCache, candidate: Int[Array, "B"], positions: Int[Array, "B T"]
) -> KVCache | PagedCache:
    """Writes the tokens of one candidate draft per row over those of the candidate that was written last.

    Of the pending states of recurrent layers, that of the candidate remains.

    Args:
        cache: the cache after a pass over all candidates.
        new: keys and values of all candidates, ``[B, M, T, K, H]`` per layer.
        candidate: index of the candidate to keep.
        positions: of its tokens; those at or past ``S`` are dropped.
    """
    rows = jnp.arange(candidate.shape[0])

    def keep(layers: tuple[LayerKV, ...], of_all: Any) -> tuple[LayerKV, ...]:
        return tuple(append(layer, new[rows, candidate], positions) for layer, new in zip(layers, of_all, strict=True))

    keys, values = split_layers(cache)
    num_candidates = new.keys[0].shape[1]
    states = tuple(keep_candidate_state(one, candidate, num_candidates) for one in _pending(cache))
    return join_layers(cache, keep(keys, new.keys), keep(values, new.values), states)


def gather_rows(tree: Any, rows: Int[Array, "rows"]) -> Any:
    """Selects `rows` of every array of a cache or a state, to replicate a prompt or to compact a batch.

    Of a paged cache only the tables and the states are gathered.
    """

    def take(leaf):
        if isinstance(leaf, PagedCache):
            tables, states = gather_rows((leaf.tables, leaf.states), rows)
            return leaf._replace(tables=tables, states=states)
        return jnp.take(leaf, rows, axis=0, mode="clip")

    return jax.tree.map(take, tree, is_leaf=is_paged)


def is_paged(node: Any) -> bool:
    """Returns whether a node of a tree is a paged cache."""
    return isinstance(node, PagedCache)


def as_paged(tree: Any, num_pages: int, page_size: int, tables: Int[Array, "B M"]) -> Any:
    """Replaces every dense cache in `tree` by an empty paged one of the same layers and heads.

    Args:
        tree: a tree with dense caches.
        num_pages: P; 0 for caches without pages, which `with_pages` adds.
        page_size: slots per page.
        tables: tables of the rows.
    """

    def empty(node):
        if not isinstance(node, KVCache):
            return node

        def pages(layers):
            if num_pages == 0:
                return ()
            return tuple(pages_like(one) for one in layers)

        def pages_like(one):
            is_int8 = isinstance(one, Int8KV)
            shape = num_pages, one.shape[1], page_size, one.shape[3]
            return _zeros(shape, is_int8=is_int8, dtype=jnp.dtype(jnp.int8) if is_int8 else one.dtype)

        return PagedCache(pages(node.keys), pages(node.values), tables, node.states)

    return jax.tree.map(empty, tree, is_leaf=lambda node: isinstance(node, KVCache))


def pages_of(tree: Any) -> tuple[tuple[Any, Any], ...]:
    """Returns the keys and values of every paged cache in `tree`, in order."""
    nodes = jax.tree.leaves(tree, is_leaf=is_paged)
    return tuple((node.keys, node.values) for node in nodes if is_paged(node))


def with_pages(tree: Any, pages: tuple[tuple[Any, Any], ...] | None) -> Any:
    """Puts `pages_of` another tree into the paged caches of `tree`; None removes their pages."""
    rest = iter(pages or ())

    def put(node):
        if not is_paged(node):
            return node
        keys, values = ((), ()) if pages is None else next(rest)
        return node._replace(keys=keys, values=values)

    return jax.tree.map(put, tree, is_leaf=is_paged)
