"""Weights that torch has pickled, read without torch and without running anything that the pickle names.

A pickle is a program. This reads its opcodes one by one and knows five things that a file of weights needs: plain
values, ordered dicts, storages, tensors that view them, and parameters around tensors. Whatever else it names is
refused; nothing is ever imported or called. It is what torch does with ``weights_only=True``, by fewer words.
"""

import math
import mmap
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bass_jax.checkpoint.safetensors import FLOATS
from bass_jax.runtime.files import one_line

_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
_DICT = ("collections", "OrderedDict")
_NAMES = {_REBUILD, _PARAMETER, _DICT, *(("torch", name) for name in _STORAGES)}


class _Name(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    kind: str
    key: str
    size: int  # elements


class RefusedError(ValueError):
    """The pickle wants what weights have no need of."""


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements


class TorchFile:
    """Tensors of one ``pytorch_model.bin``.

    Attributes:
        path: of the file.
        kinds: stored dtype of every tensor, named as safetensors does, such as ``"BF16"``.
        shapes: of every tensor.
    """

    def __init__(self, path: Path):
        """Maps the file and reads what it holds.

        Raises:
            ValueError: naming the file, if it is damaged, holds anything but tensors by name, or names anything to
                be called that tensors do not need.
        """
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                entries = {info.filename: info for info in archive.infolist()}
                [pickled] = [name for name in entries if name.endswith("/data.pkl") or name == "data.pkl"]
                root = pickled.removesuffix("data.pkl")
                if entries[pickled].compress_type != zipfile.ZIP_STORED:
                    raise ValueError("its pickle is compressed")
                if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
                    raise ValueError("its numbers are big-endian")
                content = archive.read(pickled)
        except Exception as error:  # Damage shows as whatever the reader of archives trips over.
            reason = "expected the zip archive that torch writes since 1.6" if _is_other(error) else one_line(error)
            raise ValueError(f"{path}: not readable as weights of torch: {reason}") from None
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._tensors = _read_tensors(content)
            storages = {tensor.storage for tensor in self._tensors.values()}
            self._starts = {one: self._locate(entries, f"{root}data/{one.key}", one) for one in storages}
            for name, tensor in self._tensors.items():
                _check_view(name, tensor)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self.kinds = {name: tensor.storage.kind for name, tensor in self._tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor of floating point, mapped: copy it before the file may change."""
        storage, offset, shape, strides = self._tensors[name]
        numbers = np.frombuffer(self._memory, FLOATS[storage.kind], storage.size, self._starts[storage])[offset:]
        steps = tuple(stride * numbers.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(numbers, shape, steps, writeable=False)

    def release(self) -> None:
        """Lets go of the pages that were read; they stay in the system's cache."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _locate(self, entries: dict[str, zipfile.ZipInfo], name: str, storage: _Storage) -> int:
        """Where a storage's bytes begin in the file."""
        entry = entries.get(name)
        if entry is None:
            raise ValueError(f"storage {name!r} is missing")
        header = self._memory[entry.header_offset : entry.header_offset + 30]
        if len(header) < 30 or header[:4] != b"PK\x03\x04" or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"storage {name!r} is compressed or damaged")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start, size = entry.header_offset + 30 + lengths, storage.size * _SIZES[storage.kind]
        if storage.size < 0 or entry.file_size < size or start + size > len(self._memory):
            raise ValueError(f"storage {name!r}: {entry.file_size} bytes, expected {size}")
        return start


def _is_other(error: Exception) -> bool:
    return isinstance(error, zipfile.BadZipFile) and "not a zip file" in str(error)


def _check_view(name: str, tensor: _Tensor) -> None:
    storage, offset, shape, strides = tensor
    if len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
        raise ValueError(f"tensor {name!r}: shape {list(shape)}, strides {list(strides)}, offset {offset}")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and max(last + 1, math.prod(shape)) > storage.size:
        raise ValueError(f"tensor {name!r} reaches past its storage of {storage.size} numbers")


def _read_tensors(content: bytes) -> dict[str, _Tensor]:
    try:
        found = _run(pickletools.genops(content))
    except RefusedError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"a damaged pickle: {one_line(error)}") from None
    is_named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    if not is_named or not all(isinstance(tensor, _Tensor) for tensor in found.values()):
        raise ValueError("expected tensors by name, and nothing else")
    return found


def _run(operations: Iterator) -> Any:
    """Runs a pickle whose every name is one of `_NAMES`."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def to_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, marks.pop()
        return items

    def take(count: int) -> tuple:
        if len(stack) < count:
            raise IndexError("a value is missing")
        items = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        return items

    for operation, argument, _ in operations:
        match operation.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(stack)
                stack = []
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[operation.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[operation.name]())
            case "TUPLE":
                items = to_mark()  # First: it changes what `stack` is.
                stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(take(int(operation.name[-1])))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "APPEND" | "APPENDS":
                items = list(take(1)) if operation.name == "APPEND" else to_mark()
                whole: Any = stack[-1]
                whole.extend(items)
            case "SETITEM" | "SETITEMS":
                items = list(take(2)) if operation.name == "SETITEM" else to_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                stack.append(_find(*(argument.split(" ", 1) if argument else take(2))))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                stack.append(_call(*take(2)))
            case "BUILD":  # The version numbers that a module leaves beside its state.
                take(1)
                if not isinstance(stack[-1], dict):
                    raise RefusedError("the pickle sets the state of what is no dict")
            case name:
                raise RefusedError(f"the pickle uses {name}, which weights have no need of")
    raise ValueError("it has no end")


def _find(module: Any, name: Any) -> _Name:
    if (module, name) not in _NAMES:
        raise RefusedError(
            f"the pickle names {module}.{name}, which weights have no need of: it may run code and is not read"
        )
    return _Name(module, name)


def _storage(identity: Any) -> _Storage:
    tag, kind, key, _, size = identity
    is_storage = isinstance(kind, _Name) and kind.name in _STORAGES
    if tag != "storage" or not is_storage or not isinstance(key, str) or type(size) is not int:
        raise ValueError("a storage is misdescribed")
    return _Storage(_STORAGES[kind.name], key, size)


def _call(function: Any, arguments: Any) -> Any:
    if function == _DICT and arguments == ():
        return {}
    if function == _PARAMETER and isinstance(arguments[0], _Tensor):
        return arguments[0]
    if function == _REBUILD:
        storage, offset, shape, strides, *_ = arguments
        is_view = all(type(number) is int for number in (offset, *shape, *strides))
        if isinstance(storage, _Storage) and isinstance(shape, tuple) and isinstance(strides, tuple) and is_view:
            return _Tensor(storage, offset, shape, strides)
    raise ValueError("it calls what it should not")
