"""Reads Hugging Face directories: ``config.json`` and safetensors, one file or an index with shards."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from bass_jax.checkpoint.manifest import one_line, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip


class HuggingFaceDirectory:
    """A directory of safetensors, memory-mapped.

    Attributes:
        path: of the directory.
        config: its ``config.json``.
        dtype: ``"bfloat16"`` when every tensor is; else ``"float32"``.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self._files = _weight_files(path)
        self._tensors: dict[str, Any] = {}
        kinds = set()
        for file in self._files:
            try:
                handle = safe_open(str(file), framework="np")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: not readable as safetensors: {one_line(error)}") from None
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in self._tensors:
                    raise ValueError(f"{file}: tensor {name!r} is in another shard too")
                self._tensors[name] = (file, handle)
                kinds.add(handle.get_slice(name).get_dtype())
        self.dtype = "bfloat16" if kinds == {"BF16"} else "float32"

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(handle.get_slice(name).get_shape()) for name, (_, handle) in self._tensors.items())

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor in its stored dtype.

        Raises:
            ValueError: naming file and tensor, if it is not of floating point.
        """
        file, handle = self._tensors[name]
        kind = handle.get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise ValueError(f"{file}: tensor {name!r} has the dtype {kind}; expected one of {list(_FLOATS)}")
        return handle.get_tensor(name)


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.is_file():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(map(_is_file_name, table.values())):
            raise ValueError(f"{index}: weight_map: expected a file name per tensor")
        files = [path / name for name in sorted(set(table.values()))]
        for file in files:
            if not file.is_file():
                raise ValueError(f"{index}: names {file.name}, which is missing")
        return files
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if pickled := sorted(path.glob("pytorch_model*.bin")):
        raise ValueError(f"{pickled[0]}: pickled weights can run code and are not read; convert them to safetensors")
    raise ValueError(f"{path}: no weights: expected {_SINGLE} or {_INDEX}")


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name
