"""Helpers that do not depend on models: argument checks, compiled functions, files, YAML, imports by name, progress.

Imports `bass_jax.typing` and `kernels_pallas` only; every other package may import it. Start with `jit_cache.py`, which
compiles every step.
"""

from bass_jax.runtime.xla_flags import configure_gpu, use_compilation_cache

__all__ = [
    "configure_gpu",
    "use_compilation_cache",
]
