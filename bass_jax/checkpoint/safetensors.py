"""One file of safetensors, memory-mapped: a tensor is a view of the page cache until it is copied into place."""

import json
import math
import mmap
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from bass_jax.runtime.files import one_line

FLOATS = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
"""Stored dtypes that are read."""


class SafetensorsFile:
    """Tensors of one file.

    Attributes:
        path: of the file.
        kinds: stored dtype of every tensor, such as ``"BF16"``.
        shapes: of every tensor.
    """

    def __init__(self, path: Path):
        """Maps the file.

        Raises:
            ValueError: naming the file, if it is truncated or not one of safetensors.
        """
        self.path = path
        try:
            # The library checks the header against the file: every range inside it, none overlapping.
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
        """Returns a tensor of floating point, mapped: copy it before the file may change."""
        shape = self.shapes[name]
        return np.frombuffer(self._memory, FLOATS[self.kinds[name]], math.prod(shape), self._starts[name]).reshape(
            shape
        )

    def release(self) -> None:
        """Lets go of the pages that were read; they stay in the system's cache."""
        self._memory.madvise(mmap.MADV_DONTNEED)
