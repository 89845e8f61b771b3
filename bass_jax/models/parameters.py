"""Declares parameters with their logical axes."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

LOGICAL_AXES = ("embed", "experts", "kv_heads", "mlp", "vocab")
"""Axes that a mesh may shard; see `bass_jax.models.sharding`."""

ones, zeros = nn.initializers.ones, nn.initializers.zeros


def declare(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    axes: Sequence[str | None],
    initializer: Callable | None = None,
    dtype: Any = None,
) -> Any:
    """Declares a parameter of `module`, by default in the dtype of the module's `config`.

    Raises:
        ValueError: if the parameter exists with another shape.
    """
    if module.has_variable("params", name):
        # Not `module.param`, which would trace the initializer in every call to check the shape.
        value = nn.meta.unbox(module.get_variable("params", name))
        if value.shape != tuple(shape):
            raise ValueError(f"{'/'.join((*module.path, name))}: shape {value.shape}; expected {tuple(shape)}")
        return value
    initializer = initializer or nn.initializers.normal(0.02)
    boxed = nn.with_logical_partitioning(initializer, tuple(axes))
    return module.param(name, boxed, tuple(shape), jnp.dtype(dtype or module.config.dtype))  # type: ignore[attr-defined]
