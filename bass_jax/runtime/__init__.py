"""Helpers that know nothing of models: argument checks, compiled functions, files, YAML, imports by name, progress.

Imports `bass_jax.typing` and `kernels_pallas` only; every other package may import it. Start with `jit_cache.py`, which
compiles every step.
"""
