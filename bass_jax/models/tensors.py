"""Declares parameters with their logical axes."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

LOGICAL_AXES = ("embed", "kv_heads", "mlp", "vocab")
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
    """Declares a parameter of `module`, whose `config` says the dtype where none is given."""
    initializer = initializer or nn.initializers.normal(0.02)
    boxed = nn.with_logical_partitioning(initializer, tuple(axes))
    return module.param(name, boxed, tuple(shape), jnp.dtype(dtype or module.config.dtype))  # type: ignore[attr-defined]
