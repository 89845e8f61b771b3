"""Reads and writes a safetensors file, one tensor at a time.

The reader and the writer of the library keep a whole checkpoint in memory. Here a file is mapped, and a tensor is a
view of the page cache until it is copied.
"""

import functools
import json
import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from bass_jax.models.families import tensor_layout
from bass_jax.runtime.files import one_line

FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Stored dtypes of other libraries' weights that can be read."""

DTYPES = FLOATS | {"I8": np.dtype(np.int8), "I32": np.dtype(np.int32)}
"""Stored dtypes of our own checkpoints."""

BYTES = {"U8": np.dtype(np.uint8)}
"""Stored dtypes of tensors in which numbers are packed."""

FP8 = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
"""Stored dtypes of weights that have a scale per block."""

INDICES = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}
"""Stored dtypes of other libraries' tensors of token ids."""


class SafetensorsFile:
    """The tensors of one file.

    Attributes:
        path: the file.
        kinds: the stored dtype of every tensor, such as ``"BF16"``.
        shapes: the shape of every tensor.
    """

    def __init__(self, path: Path):
        """Maps the file.

        Raises:
            ValueError: naming the file, if it is truncated or not a safetensors file.
        """
        self.path = path
        try:
            # The library checks that every range of the header is inside the file and that none overlap.
            with safe_open(str(path), framework="np"):
                pass
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path}: not readable as safetensors: {one_line(error)}") from None
        length = int.from_bytes(self._memory[:8], "little")
        header = json.loads(self._memory[8 : 8 + length])
        header.pop("__metadata__", None)
        self._starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
        self.kinds = {name: entry["dtype"] for name, entry in header.items()}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a mapped tensor, which is valid while the file does not change."""
        dtype, shape = (DTYPES | INDICES | BYTES | FP8)[self.kinds[name]], self.shapes[name]
        return np.frombuffer(self._memory, dtype, math.prod(shape), self._starts[name]).reshape(shape)

    def release(self) -> None:
        """Unmaps the pages that were read; they stay in the system's page cache."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def tensor_builders(path: Path, expected: Mapping[str, Any]) -> dict[str, Callable[[], np.ndarray]]:
    """Checks the names, shapes and dtypes of a file's tensors, and returns a function per tensor that reads it.

    Args:
        path: the file.
        expected: the shape and dtype of every tensor; tensors are cast to that dtype.

    Raises:
        ValueError: naming the file and the tensor, if one is missing, unexpected, or of another shape or kind of dtype.
    """
    file = SafetensorsFile(path)
    if missing := sorted(expected.keys() - file.kinds.keys()):
        raise ValueError(f"{path}: missing tensor {missing[0]!r} ({len(missing)} missing)")
    if extra := sorted(file.kinds.keys() - expected.keys()):
        raise ValueError(f"{path}: unexpected tensor {extra[0]!r} ({len(extra)} unexpected)")
    for name, leaf in expected.items():
        kind = file.kinds[name]
        if file.shapes[name] != tuple(leaf.shape):
            raise ValueError(f"{path}: tensor {name!r} has the shape {file.shapes[name]}; expected {leaf.shape}")
        if (kind in FLOATS) != jnp.issubdtype(leaf.dtype, jnp.floating) or kind not in DTYPES:
            raise ValueError(f"{path}: tensor {name!r} has the dtype {kind}; expected {leaf.dtype}")

    def build(name: str, dtype: np.dtype) -> np.ndarray:
        mapped = file.read(name)
        array = tensor_layout.contiguous(mapped) if mapped.dtype == dtype else mapped.astype(dtype)
        file.release()
        return array

    return {name: functools.partial(build, name, leaf.dtype) for name, leaf in expected.items()}


def write_safetensors(path: Path, shapes: Mapping[str, Any], build: Callable[[str], np.ndarray]) -> None:
    """Writes a file with one tensor in memory at a time.

    Args:
        path: the file.
        shapes: the shape and dtype of every tensor.
        build: returns the tensor of a name; called in the order of `shapes`.
    """
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    header, start = {}, 0
    for name, leaf in shapes.items():
        end = start + math.prod(leaf.shape) * leaf.dtype.itemsize
        header[name] = {"dtype": kinds[leaf.dtype], "shape": leaf.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            file.write(np.ascontiguousarray(build(name)).reshape(-1).view(np.uint8).data)
