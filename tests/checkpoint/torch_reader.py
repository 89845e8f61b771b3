"""Writes files with torch and reads them with `TorchFile`. Runs in the peers environment: it has torch but not JAX.

    python torch_reader.py directory

Writes ``directory/results.json`` with the error message of every case, None if there was none, and
``directory/CASE.npz`` with the tensors that were read. A bfloat16 tensor is stored as uint16.
"""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]


class Touch:
    """An object whose pickle creates a file when it is run."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def import_reader():
    """Imports `TorchFile` without the ``__init__.py`` files of its packages, because they import JAX."""
    for name in ("bass_jax", "bass_jax.checkpoint", "bass_jax.runtime"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules.setdefault("ml_dtypes", types.SimpleNamespace(bfloat16=np.uint16))
    from bass_jax.checkpoint.torch_file import TorchFile

    return TorchFile


def write_cases(directory):
    matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    weights = {
        "plain": matrix + 0.5,
        "transposed": matrix.T,
        "part": matrix[1:, 2:],
        "parameter": torch.nn.Parameter(matrix.double()),
        "half": matrix.half(),
        "bfloat16": (matrix / 7).bfloat16(),
        "mask": matrix > 3,
    }
    torch.save(weights, directory / "weights.bin")
    content = (directory / "weights.bin").read_bytes()
    for size in (0, 7, 100, len(content) // 2, len(content) - 1):
        (directory / f"cut_{size}.bin").write_bytes(content[:size])
    torch.save(weights | {"epoch": 3}, directory / "value.bin")
    torch.save([matrix], directory / "list.bin")
    torch.save(torch.nn.Linear(3, 2).state_dict(), directory / "module.bin")
    torch.save({"a": Touch(directory / "pwned")}, directory / "code.bin")
    torch.save(weights, directory / "old.bin", _use_new_zipfile_serialization=False)


def main(directory):
    torch_file, results = import_reader(), {}
    write_cases(directory)
    for path in sorted(directory.glob("*.bin")):
        try:
            file = torch_file(path)
            assert file.shapes == {name: file.read(name).shape for name in file.kinds}
            np.savez(path.with_suffix(".npz"), **{name: file.read(name) for name in file.kinds})
            results[path.stem] = None
        except ValueError as error:
            results[path.stem] = str(error)
    (directory / "results.json").write_text(
        json.dumps({"errors": results, "kinds": torch_file(directory / "weights.bin").kinds})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
