"""The dimension table and the array types that the package's annotations use.

| letter | meaning |
|---|---|
| B | rows of the batch |
| T | query tokens of a pass; ``G + 1`` when it verifies |
| G | draft tokens of a step (the bucket) |
| S | capacity of a cache, in tokens |
| C | capacity of a token buffer |
| N | query heads |
| K | key-value heads |
| R | query heads per key-value head, ``N / K`` |
| H | size of a head |
| D | width of the residual stream |
| E | width of the input embedding (``D`` unless projected) |
| F | width of the mlp |
| V | vocabulary |
| O | vocabulary that a trimmed draft can propose |
| L | layers |
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key, UInt

type Params = Any
"""A nested dict of arrays, as Linen's ``init`` returns under ``"params"``."""


def check_array(value: Any, name: str, shape: Sequence[int], kind: Any) -> None:
    """Checks what a user's part returned; when traced, and free at run time.

    Args:
        value: to check.
        name: of it, for the message.
        shape: expected.
        kind: expected, ``jnp.integer`` or ``jnp.floating``.

    Raises:
        ValueError: naming the value, what it is and what was expected.
    """
    expected = f"expected {kind.__name__} values of shape {list(shape)}"
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"{name} is of type {type(value).__name__}: {expected}")
    if not jnp.issubdtype(value.dtype, kind) or value.shape != tuple(shape):
        raise ValueError(f"{name} has dtype {value.dtype} and shape {list(value.shape)}: {expected}")


__all__ = ["Array", "Bool", "Float", "Int", "Key", "Params", "UInt", "check_array"]
