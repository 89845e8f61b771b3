"""Helpers that do not depend on models: argument checks, compiled functions, files, YAML, imports by name, progress.

Imports `bass_jax.typing` and `kernels_pallas` only; every other package may import it. Start with `jit_cache.py`, which
compiles every step.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bass_jax.runtime.xla_flags import configure_gpu, use_compilation_cache

__all__ = [
    "configure_gpu",
    "use_compilation_cache",
]


def __getattr__(name: str) -> Any:
    """Imports jax when a public name is first used, because some modules of this package do without it."""
    if name not in __all__:
        raise AttributeError(f"module 'bass_jax.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module("bass_jax.runtime.xla_flags"), name)
