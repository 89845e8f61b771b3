"""A replacement of `TorchFile` that reads NumPy archives, for environments without torch."""

from pathlib import Path

import ml_dtypes
import numpy as np

_KINDS = {"float32": "F32", "bfloat16": "BF16"}


def write_npz(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors as a NumPy archive; bfloat16 is stored as uint16."""
    arrays = {
        name: array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array for name, array in tensors.items()
    }
    with path.open("wb") as file:
        np.savez(file, **arrays)


class NpzFile:
    """The tensors of a file that `write_npz` wrote, with the interface of `TorchFile`."""

    def __init__(self, path: Path):
        with np.load(path) as file:
            arrays = dict(file)
        self.path = path
        self._arrays = {
            name: array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
            for name, array in arrays.items()
        }
        self.kinds = {name: _KINDS.get(array.dtype.name, array.dtype.name) for name, array in self._arrays.items()}
        self.shapes = {name: array.shape for name, array in self._arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def release(self) -> None:
        pass
