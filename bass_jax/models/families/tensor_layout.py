"""Copies of transposed arrays in tiles.

Copying a large transposed view row by row misses the cache at every element. A tile that is long along the contiguous
axis of the source, and one cache line wide along that of the destination, uses all of every cache line that it loads.
"""

import functools
import itertools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

LONG = 2048
"""Elements of a tile along the contiguous axis of the source."""

WIDE = 64
"""Bytes of a tile along the contiguous axis of the destination: a cache line."""

ALIGNMENT = 64
"""JAX on a CPU uses an array whose address is a multiple of this many bytes without a copy."""

_SMALL = 1 << 18
"""Number of elements below which threads cost more than they save."""


def empty(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns an uninitialized array that is aligned for JAX."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def copy(destination: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `destination`; both may have any strides.

    Raises:
        ValueError: if their shapes differ.
    """
    if destination.shape != source.shape:
        raise ValueError(f"shapes {list(source.shape)} and {list(destination.shape)} differ")
    if destination.dtype == source.dtype:  # As integers, because NumPy copies bfloat16 one element at a time.
        kind = np.dtype(f"u{source.itemsize}")
        destination, source = destination.view(kind), source.view(kind)
    destination, source = _merged(destination, source)
    if source.size < _SMALL:
        np.copyto(destination, source)
        return

    def move(tile):
        np.copyto(destination[tile], source[tile])

    list(_pool().map(move, _tiles(destination, source)))


def contiguous(source: np.ndarray) -> np.ndarray:
    """Returns a new, aligned copy of `source` in row-major order."""
    copied = empty(source.shape, source.dtype)
    copy(copied, source)
    return copied


@functools.cache
def _pool() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="tiles")


def _tiles(destination: np.ndarray, source: np.ndarray) -> Iterable[tuple[slice, ...]]:
    theirs, ours = int(np.argmin(source.strides)), int(np.argmin(destination.strides))
    if theirs == ours:
        sides = [max(1, _SMALL // source[0].size), *source.shape[1:]]
    else:
        sides = [1] * source.ndim
        sides[theirs], sides[ours] = LONG, WIDE // source.itemsize
    starts = [range(0, size, side) for size, side in zip(source.shape, sides, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(start, start + side) for start, side in zip(corner, sides, strict=True))


def _merged(destination: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns views in which neighboring axes are merged where the strides of both arrays allow it."""
    axes: list[list[int]] = []  # [size, stride of the destination, stride of the source]
    for size, *strides in zip(source.shape, destination.strides, source.strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1:] == [stride * size for stride in strides]:
            axes[-1] = [axes[-1][0] * size, *strides]
        else:
            axes.append([size, *strides])
    if not axes or source.size == 0:
        return destination.reshape(source.shape), source
    shape, ours, theirs = zip(*axes, strict=True)
    view = np.lib.stride_tricks.as_strided
    return view(destination, shape, ours), view(source, shape, theirs)
