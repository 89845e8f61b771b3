"""Grouped products: every row is multiplied by the matrix of its group, such as an expert.

Imports jax only. Start with `xla.py`; `kernels_pallas.ops` selects the implementation.
"""
