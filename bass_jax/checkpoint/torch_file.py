"""Reads weights that torch has pickled, without running code of the pickle."""

import pickle
from pathlib import Path

import ml_dtypes
import numpy as np

from bass_jax.runtime.files import one_line

_KINDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
}


class TorchFile:
    """The tensors of one ``pytorch_model.bin``.

    Attributes:
        path: the file.
        kinds: the stored dtype of every tensor; those of weights and token ids have their names in safetensors.
        shapes: the shape of every tensor.
    """

    def __init__(self, path: Path):
        """Maps the file.

        Raises:
            ValueError: naming the file, if torch is not installed or rejects the file, or if the file contains anything
                but named tensors.
        """
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise ValueError(f"{path}: reading weights of torch needs torch: pip install 'bass-jax[torch]'") from None
        self.path = path
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError:
            raise ValueError(
                f"{path}: its pickle names more than weights need; it may run code and is not read"
            ) from None
        except Exception as error:  # torch raises exceptions of many types for damaged files
            raise ValueError(f"{path}: not readable as weights of torch: {one_line(error)}") from None
        is_named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
        if not is_named or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
            raise ValueError(f"{path}: expected tensors by name, and nothing else")
        self._tensors, self._bits = found, torch.uint16
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in found.items()}
        self.kinds = {name: _KINDS.get(dtype, dtype) for name, dtype in dtypes.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a mapped tensor, which is valid while the file does not change."""
        tensor = self._tensors[name].detach()
        if self.kinds[name] == "BF16":  # torch does not convert bfloat16 to NumPy
            return tensor.view(self._bits).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def release(self) -> None:
        """Does nothing: the system drops pages of a mapped file when it needs the memory."""
