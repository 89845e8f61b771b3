"""Writes and reads parameters in Orbax's format, a tensor and a piece of it at a time."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from bass_jax.checkpoint.manifest import hash_array
from bass_jax.runtime.files import one_line
from bass_jax.runtime.trees import flatten, unflatten

_SUBDIRECTORY = "params"
_MAX_PIECE = 4 << 20
"""Bytes of a stored piece of a tensor, if its shape can be divided so: reading one takes twice that."""
_MIN_PIECE = 1 << 10
"""Every piece costs some 50 us to read; a tensor that could only be divided into smaller ones is stored in larger."""
_SHARE_IN_FLIGHT = 0.1
"""Of the largest tensor: how much is being read at a time, unless one piece alone is more."""
_ALIGNMENT = 64
"""Bytes; the CPU's arrays are made of such memory without a copy."""


def write_arrays(directory: Path, tree: Any) -> None:
    """Writes a nested dict of arrays into ``directory/params``."""
    args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_piece_bytes(leaf.shape, leaf.dtype)), tree)
    with ocp.PyTreeCheckpointer() as checkpointer:
        path = (directory / _SUBDIRECTORY).resolve()
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=args))
    # Not needed on a file system, and it holds the path that the directory had while it was written.
    (directory / _SUBDIRECTORY / "commit_success.txt").unlink(missing_ok=True)


def read_arrays(
    directory: Path, expected: Any, keep: Callable[[str, jax.Array], dict[str, jax.Array]] | None = None
) -> Any:
    """Reads ``directory/params``, every array cast and straight to where it belongs.

    Args:
        directory: the checkpoint.
        expected: nested dict of `jax.ShapeDtypeStruct` with a sharding each; dtypes are what the stored
            arrays are cast to.
        keep: told the path and array of each as soon as it is read; returns what is kept of it, by path. Default
            the array itself.

    Returns:
        The arrays in the structure of `expected`, but for what `keep` makes of it.

    Raises:
        ValueError: naming directory and tensor, if one is missing, extra or misshapen, or unreadable.
    """
    path, wanted = (directory / _SUBDIRECTORY).resolve(), flatten(expected)
    stored = _read_metadata(path)
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ValueError(f"{path}: missing tensor {missing[0]!r} ({len(missing)} missing)")
    if extra := sorted(stored.keys() - wanted.keys()):
        raise ValueError(f"{path}: unexpected tensor {extra[0]!r} ({len(extra)} unexpected)")
    for name, leaf in wanted.items():
        _check(path, name, stored[name], leaf)
    # Orbax itself reads several tensors at a time, and all of a tensor's compressed pieces at once: too much memory.
    # So its format is read here, by the library that it reads it with.
    in_flight = int(_SHARE_IN_FLIGHT * max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in wanted.values()))
    context, arrays = _context(), {}
    for name, leaf in wanted.items():
        with _naming(path, name):
            array = _read(_open(path, name, context), leaf, in_flight)
        arrays |= {name: array} if keep is None else keep(name, array)
    return unflatten(arrays)


def hash_stored(directory: Path) -> dict[str, str]:
    """Reads ``directory/params`` back, a tensor at a time, and returns the `hash_array` of each by its path.

    Raises:
        ValueError: naming directory and tensor, if one is unreadable.
    """
    path, hashes = (directory / _SUBDIRECTORY).resolve(), {}
    context = _context()
    for name, stored in _read_metadata(path).items():
        everything = (slice(None),) * len(stored.shape)
        with _naming(path, name):
            array = _read_part(_open(path, name, context), everything, np.dtype(stored.dtype), 4 * _MAX_PIECE)
            hashes[name] = hash_array(array)
    return hashes


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ValueError(f"{path.parent}: no parameters: {path.name}/ is missing")
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            return flatten(checkpointer.metadata(path).item_metadata.tree)
        except Exception as error:  # Orbax and TensorStore raise what they meet.
            raise ValueError(f"{path}: not a readable Orbax checkpoint: {one_line(error)}") from None


def _check(path: Path, name: str, stored: Any, leaf: jax.ShapeDtypeStruct) -> None:
    if tuple(stored.shape) != tuple(leaf.shape):
        raise ValueError(f"{path}: tensor {name!r} has the shape {tuple(stored.shape)}; expected {leaf.shape}")
    if jnp.issubdtype(stored.dtype, jnp.floating) != jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(f"{path}: tensor {name!r} has the dtype {stored.dtype}; expected {leaf.dtype}")


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TensorStore raises what it meets.
        raise ValueError(f"{path}: tensor {name!r}: damaged: {one_line(error)}") from None


def _context() -> ts.Context:
    """Keeps the store's index of pieces between tensors, and no piece."""
    return ts.Context({"cache_pool#nodes": {"total_bytes_limit": 100_000_000}})


def _open(path: Path, name: str, context: ts.Context) -> ts.TensorStore:
    """Opens one tensor: an array of Zarr under Orbax's name for it, in its key-value store."""
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "cache_pool": "cache_pool#nodes"}
    spec = {
        "driver": "zarr",
        "kvstore": store | {"path": f"{name.replace('/', '.')}/"},
        "fill_missing_data_reads": False,  # What is missing is damage, not zeros.
    }
    return ts.open(spec, context=context, open=True, read=True).result()


def _read(stored: ts.TensorStore, leaf: jax.ShapeDtypeStruct, in_flight: int) -> jax.Array:
    """Reads one tensor into the shards of its sharding."""

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        everything = (slice(None),) * len(leaf.shape)
        return _read_part(stored, everything if index is None else index, leaf.dtype, in_flight)

    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)
    return jax.block_until_ready(array)  # Its memory on the host is free before the next one's is taken.


def _read_part(stored: ts.TensorStore, index: tuple[slice, ...], dtype: np.dtype, in_flight: int) -> np.ndarray:
    """Reads a part of a tensor, `in_flight` bytes at a time or one piece, whichever is more."""
    index = tuple(slice(*part.indices(size)) for part, size in zip(index, stored.shape, strict=True))
    array = _aligned(tuple(part.stop - part.start for part in index), dtype)
    target = ts.array(array).translate_to[[part.start for part in index]]
    cast = stored.astype(dtype)
    chunk = math.prod(stored.chunk_layout.read_chunk_template.shape) * stored.dtype.numpy_dtype.itemsize
    waiting: deque[Any] = deque()
    for box in _boxes(stored, index):
        if len(waiting) >= max(1, in_flight // chunk):
            waiting.popleft().result()
        waiting.append(target[box].write(cast[box]))
    for write in waiting:
        write.result()
    return array


def _boxes(stored: ts.TensorStore, index: tuple[slice, ...]) -> Iterator[tuple[slice, ...]]:
    """The pieces that a part of a tensor lies in, each cut to that part."""
    sizes, ranges = stored.chunk_layout.read_chunk_template.shape, []
    for size, part in zip(sizes, index, strict=True):
        starts = range(part.start // size * size, part.stop, size)
        ranges.append([slice(max(part.start, at), min(part.stop, at + size)) for at in starts])
    return itertools.product(*ranges)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that an array of the CPU is made of without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _piece_bytes(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> int | None:
    """Bytes of the pieces to store a tensor in; None for one piece.

    Orbax divides the longest axis by its next factor until a piece is no larger than it is told to make it. A long axis
    of prime length so falls to 1; where that is far too little, Orbax is told what the step before it makes.
    """
    itemsize = np.dtype(dtype).itemsize
    lengths = list(shape)
    while (size := math.prod(lengths) * itemsize) > _MAX_PIECE:
        axis = lengths.index(longest := max(lengths))
        # Of the tensor's axis: its next factor below.
        lengths[axis] = next(n for n in range(longest - 1, 0, -1) if shape[axis] % n == 0)
        if math.prod(lengths) * itemsize < _MIN_PIECE:
            break
    return size if size < math.prod(shape) * itemsize else None
