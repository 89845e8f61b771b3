"""The dimension letters and the array types of the package's annotations.

| letter | meaning |
|---|---|
| B | rows of the batch |
| T | query tokens of a pass; ``G + 1`` in a verification pass |
| G | draft tokens of a step: the bucket of `SpecConfig.draft_len` |
| M | candidate drafts per row; pages per row of a paged cache |
| S | capacity of a cache, in tokens; the target's has ``S = C`` |
| C | capacity of a token buffer |
| N | query heads |
| K | key-value heads |
| R | query heads per key-value head, ``N / K`` |
| H | size of a head |
| D | width of the residual stream |
| E | width of the input embedding (``D`` unless projected) |
| F | width of the MLP |
| V | vocabulary size |
| O | reduced vocabulary: tokens that a draft model can propose |
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
"""A nested dict of arrays, as Flax Linen's ``init`` returns it under ``"params"``."""


def check_array(value: Any, name: str, shape: Sequence[int], kind: Any) -> None:
    """Checks the type and shape of an array that a user's code returned. The check runs during tracing only.

    Args:
        value: the object to check.
        name: its name in the error message.
        shape: the expected shape.
        kind: the expected kind of dtype, ``jnp.integer`` or ``jnp.floating``.

    Raises:
        ValueError: if the type, dtype or shape differs.
    """
    expected = f"expected {kind.__name__} values of shape {list(shape)}"
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"{name} is of type {type(value).__name__}: {expected}")
    if not jnp.issubdtype(value.dtype, kind) or value.shape != tuple(shape):
        raise ValueError(f"{name} has dtype {value.dtype} and shape {list(value.shape)}: {expected}")


__all__ = ["Array", "Bool", "Float", "Int", "Key", "Params", "UInt", "check_array"]
