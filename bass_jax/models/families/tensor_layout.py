"""Arrays that JAX on a CPU uses without a copy."""

import numpy as np

ALIGNMENT = 64
"""JAX on a CPU uses an array whose address is a multiple of this many bytes without a copy."""


def empty(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns an uninitialized array that is aligned for JAX."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def contiguous(source: np.ndarray) -> np.ndarray:
    """Returns a new, aligned copy of `source` in row-major order."""
    copied = empty(source.shape, source.dtype)
    np.copyto(copied, source)
    return copied
