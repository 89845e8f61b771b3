"""Reads GGUF files; quantized tensors are dequantized to float32."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderField, dequantize

from bass_jax.checkpoint.gguf_architectures import ARCHITECTURES, LEFT_OUT, Architecture, Metadata
from bass_jax.runtime.files import one_line

_FREQUENCIES = "rope_freqs.weight"
"""llama.cpp stores Llama 3's rotary scaling as divisors of the frequencies, one per pair of lanes."""


class GgufFile:
    """A GGUF file with Hugging Face's tensor names; a `bass_jax.checkpoint.assemble.TensorSource`.

    Attributes:
        path: of the file.
        config: the equivalent Hugging Face configuration.
        dtype: ``"bfloat16"`` if every tensor has this dtype, otherwise ``"float32"``.
    """

    def __init__(self, path: Path):
        """Opens a file.

        Raises:
            ValueError: naming file and key, if the file is damaged or of an unknown architecture.
        """
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as error:  # damage causes errors of many types
            raise ValueError(f"{path}: not readable as GGUF: {one_line(error)}") from None
        name = self.field("general.architecture")
        if name in LEFT_OUT:
            raise ValueError(f"{path}: general.architecture={name!r}: not read from GGUF, because {LEFT_OUT[name]}")
        if name not in ARCHITECTURES:
            raise ValueError(f"{path}: general.architecture={name!r}: expected one of {list(ARCHITECTURES)}")
        self._name, self._architecture = name, ARCHITECTURES[name]
        stored = {tensor.name: tensor for tensor in self._reader.tensors}
        frequencies = stored.pop(_FREQUENCIES, None) if name == "llama" else None
        self._tensors: dict[str, Any] = {}
        self._experts: dict[str, int] = {}  # the index of each tensor that is stacked with others
        for own, tensor in stored.items():
            known = self._architecture.name_of(own)
            num_experts = int(tensor.shape[-1]) if "{}" in known else 0
            experts = {known.format(index): index for index in range(num_experts)}
            self._experts |= experts
            self._tensors |= dict.fromkeys(experts or (known,), tensor)
        self._num_elements = sum(int(tensor.n_elements) for tensor in stored.values())
        self.dtype = "bfloat16" if all(map(_is_bfloat16, self._tensors.values())) else "float32"
        self.config = self._read_config(self._architecture)
        if frequencies is not None:
            divisors = self._dequantized(frequencies)
            self.config["rope_scaling"] = _scaling_of(divisors, self.config, f"{path}: tensor {_FREQUENCIES!r}")

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a metadata value as a Python object; `default` if it is absent.

        Raises:
            ValueError: if it cannot be read.
        """
        field = self._reader.get_field(name)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise ValueError(f"{self.path}: {name}: not readable: {one_line(error)}") from None

    def names(self) -> Iterable[str]:
        """Returns the Hugging Face names of all tensors."""
        return list(self._tensors)

    def num_elements(self) -> int:
        """Returns the number of elements of all tensors."""
        return self._num_elements

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32, by its Hugging Face name.

        Raises:
            ValueError: naming file and tensor, if its quantization is unknown or its shape is impossible.
        """
        tensor = self._tensors[name]
        array = self._dequantized(tensor, self._experts.get(name))
        try:
            return self._architecture.restore(name, array, self.config)
        except ValueError as error:
            raise ValueError(f"{self.path}: misshapen tensor {tensor.name!r} {error}") from None

    def read_bytes(self, name: str) -> np.ndarray:
        """Raises ValueError: `read` returns the numbers of every quantization."""
        raise ValueError(f"{self.path}: tensor {name!r}: expected numbers, not bytes")

    def release(self, names: Iterable[str]) -> None:
        """Does nothing: the reader maps the whole file, and dequantized tensors own their memory."""

    def _dequantized(self, tensor: Any, index: int | None = None) -> np.ndarray:
        """Returns a tensor, or entry `index` of its first axis."""
        shape, data = tuple(int(size) for size in reversed(tensor.shape)), tensor.data
        if index is not None:
            shape, data = shape[1:], data[index]
        try:
            return dequantize(data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: tensor {tensor.name!r}: unknown quantization {kind}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}: tensor {tensor.name!r}: {one_line(error)}") from None

    def _read_config(self, architecture: Architecture) -> dict[str, Any]:
        config = {key: self._value(name) for key, name in architecture.keys.items()}
        for key, name in architecture.keys.items():
            if not isinstance(config[key], int) or config[key] < 1:
                raise ValueError(f"{self.path}: {self._name}.{name}={config[key]!r}: expected a positive integer")
        embedding = architecture.name_of("token_embd.weight")
        if embedding not in self._tensors:
            raise ValueError(f"{self.path}: missing tensor 'token_embd.weight'")
        config |= {"model_type": architecture.family, "vocab_size": int(self._tensors[embedding].shape[-1])}
        try:
            return architecture.finish(Metadata(self._value, self._number, frozenset(self._tensors)), config)
        except (ArithmeticError, TypeError, ValueError) as error:
            message = str(error).removeprefix(f"{self.path}: ")
            raise ValueError(f"{self.path}: {message}") from None

    def _value(self, name: str, default: Any = None) -> Any:
        return self.field(f"{self._name}.{name}", default)

    def _number(self, name: str, default: float) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float):
            raise ValueError(f"{self._name}.{name}={value!r}: expected a number")
        # Stored as float32, in which 1e-5 is 9.999999747378752e-06.
        return float(str(np.float32(value)))


class _Reader(GGUFReader):
    """The library's reader, with errors that name the tensor of an unknown type or without data.

    A damaged length is an error here. The library would read an array of numbers beyond the end of the file forever.
    """

    def _get(self, offset: int, dtype: Any, count: Any = 1, *args: Any, **options: Any) -> np.ndarray:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("a value is beyond the end of the file")
        return super()._get(offset, dtype, count, *args, **options)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        try:
            super()._build_tensors(start_offs, fields)
        except Exception:
            for field in fields:
                try:
                    super()._build_tensors(start_offs, [field])
                except Exception as error:
                    raise ValueError(f"tensor {field.name!r}: {_reason(field, error)}") from None
            raise


def _reason(field: ReaderField, error: Exception) -> str:
    kind = int(field.parts[-2][0])  # the last part is the offset
    is_known = kind in {known.value for known in GGMLQuantizationType}
    return one_line(error) if is_known else f"unknown quantization {kind}"


def _scaling_of(divisors: np.ndarray, config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns Llama 3's scaling that gives these divisors.

    Raises:
        ValueError: if there is none with low and high frequency factors of 1 and 4, as in all releases.
    """
    factor, half = round(float(np.max(divisors, initial=1)), 4), divisors.size
    if divisors.shape != (half,) or 2 * half != config["head_dim"] or not 1 < config["rope_theta"] < math.inf:
        raise ValueError(f"{where}: expected a divisor per pair of lanes, with a rotary base above 1")
    turns_per_token = config["rope_theta"] ** -(np.arange(half) / half) / (2 * math.pi)
    for context in (8192, config["max_position_embeddings"] / factor):
        turns = np.clip(context * turns_per_token, 1, 4)
        expected = 3 * factor / ((turns - 1) * factor + 4 - turns)
        if np.allclose(divisors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": round(context),
            }
    raise ValueError(f"{where}: expected the divisors of Llama 3's rotary scaling")


def _is_bfloat16(tensor: Any) -> bool:
    return tensor.tensor_type == GGMLQuantizationType.BF16
