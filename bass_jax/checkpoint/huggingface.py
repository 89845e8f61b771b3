"""Reads Hugging Face directories: ``config.json`` and weights in one file or in shards with an index."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.checkpoint.safetensors import BYTES, FLOATS, FP8, INDICES, SafetensorsFile
from bass_jax.checkpoint.torch_file import TorchFile
from bass_jax.runtime.files import read_json

_SCALE = "_scale_inv"
"""Suffix of the name of the scales of an FP8 weight."""

_LAYOUTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""The single file and the index of shards of each format, in the order of preference."""


class HuggingFaceDirectory:
    """A directory with memory-mapped weights; a `bass_jax.checkpoint.assemble.TensorSource`.

    Attributes:
        path: of the directory.
        config: its ``config.json``.
        dtype: ``"bfloat16"`` if every tensor has this dtype, or FP8 with scales, otherwise ``"float32"``.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self._tensors: dict[str, SafetensorsFile | TorchFile] = {}
        kinds = set()
        for name in _weight_files(path):
            file = (SafetensorsFile if name.suffix == ".safetensors" else TorchFile)(name)
            for tensor, kind in file.kinds.items():
                if tensor in self._tensors:
                    raise ValueError(f"{file.path}: tensor {tensor!r} is in another shard too")
                self._tensors[tensor] = file
                # These are float32 although the weights are bfloat16, and the correction bias stays float32.
                if not tensor.endswith((_SCALE, "e_score_correction_bias")):
                    kinds.add(kind)
        self.dtype = "bfloat16" if kinds & FLOATS.keys() == {"BF16"} else "float32"

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors, without the scales of FP8 weights."""
        scales = {name + _SCALE for name in self._tensors}
        return [name for name in self._tensors if name not in scales]

    def num_elements(self) -> int:
        """Returns the number of elements of all tensors."""
        return sum(math.prod(file.shapes[name]) for name, file in self._tensors.items())

    def read(self, name: str) -> np.ndarray:
        """Returns a mapped tensor in its stored dtype, of an FP8 weight the float32 values that it stands for.

        Raises:
            ValueError: naming file and tensor, if it is not floating point, or is an FP8 weight without its scales.
        """
        quantization, scale = self.config.get("quantization_config"), name + _SCALE
        if self._tensors[name].kinds[name] not in FP8 or scale not in self._tensors or not quantization:
            return self._read(name, FLOATS)
        values, scales = self._read(name, FP8), self._read(scale, FLOATS)
        block = quantization["weight_block_size"]
        expected = tuple(-(-size // block[axis % 2]) for axis, size in enumerate(values.shape))
        if values.ndim != 2 or scales.shape != expected:
            raise ValueError(f"{self.path}: tensor {scale!r} has the shape {scales.shape}; expected {expected}")
        return dequantize_blocks(values, scales, block)

    def read_indices(self, name: str) -> np.ndarray:
        """Returns a mapped tensor of integers or booleans.

        Raises:
            ValueError: naming file and tensor, if it has another dtype.
        """
        return self._read(name, INDICES)

    def read_bytes(self, name: str) -> np.ndarray:
        """Returns a mapped tensor of bytes, in which numbers are packed.

        Raises:
            ValueError: naming file and tensor, if it has another dtype.
        """
        return self._read(name, BYTES)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._tensors[name].shapes[name]

    def _read(self, name: str, kinds: Mapping[str, Any]) -> np.ndarray:
        file = self._tensors[name]
        if (kind := file.kinds[name]) not in kinds:
            raise ValueError(f"{file.path}: tensor {name!r} has the dtype {kind}; expected one of {list(kinds)}")
        return file.read(name)

    def release(self, names: Iterable[str]) -> None:
        """Frees the memory that was used to read `names`; their arrays must not be used any more."""
        for file in {self._tensors[name] for name in names}:
            file.release()


def dequantize_blocks(values: np.ndarray, scales: np.ndarray, block: Sequence[int]) -> np.ndarray:
    """Returns the float32 values of a matrix whose blocks have a scale each; the last ones may be smaller."""
    rows = np.repeat(scales.astype(np.float32), block[0], axis=0)[: values.shape[0]]
    return values.astype(np.float32) * np.repeat(rows, block[1], axis=1)[:, : values.shape[1]]


def _weight_files(path: Path) -> list[Path]:
    for single, name in _LAYOUTS:
        index = path / name
        if index.is_file():
            return _indexed(path, index)
        if (path / single).is_file():
            return [path / single]
    (single, index), (pickled, _) = _LAYOUTS
    raise ValueError(f"{path}: no weights: expected {single}, {index} or {pickled}")


def _indexed(path: Path, index: Path) -> list[Path]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(map(_is_file_name, table.values())):
        raise ValueError(f"{index}: weight_map: expected a file name per tensor")
    files = [path / name for name in sorted(set(table.values()))]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{index}: names {file.name}, which is missing")
    return files


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name
