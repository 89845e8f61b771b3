"""Writes what ``torch.save`` writes for a dict of tensors, opcode by opcode; `tests/models` reads torch's own files."""

import io
import zipfile
from pathlib import Path

import numpy as np

_STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "bool": "BoolStorage"}


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def integer(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def tensor(key: str, array: np.ndarray, size: int | None = None) -> bytes:
    """A view of the storage `key`, of `size` numbers."""
    storage = b"(" + text("storage") + b"ctorch\n" + _STORAGES[array.dtype.name].encode() + b"\n" + text(key)
    storage += text("cpu") + integer(array.size if size is None else size) + b"tQ"
    strides = tuple(stride // array.itemsize for stride in array.strides)
    view = integer(0) + numbers(array.shape) + numbers(strides) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + view + b"tR"


def pickled(items: dict[str, bytes]) -> bytes:
    content = b"".join(text(name) + value for name, value in items.items())
    return b"\x80\x02ccollections\nOrderedDict\n)Rq\x00(" + content + b"u."


def archive(pickle: bytes, storages: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/byteorder", "little")
        for key, content in storages.items():
            file.writestr(f"archive/data/{key}", content)
    return memory.getvalue()


def write_torch(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a dict of tensors."""
    items = {name: tensor(str(i), array) for i, (name, array) in enumerate(tensors.items())}
    storages = {str(i): np.ascontiguousarray(array).tobytes() for i, array in enumerate(tensors.values())}
    path.write_bytes(archive(pickled(items), storages))
