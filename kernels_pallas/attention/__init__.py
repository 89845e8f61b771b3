"""Ragged attention: a few new tokens per row attend to a KV cache whose rows have different lengths.

Imports jax only. Start with `arguments.py`, then `xla.py`; `kernels_pallas.ops` selects the implementation.
"""
