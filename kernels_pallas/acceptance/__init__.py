"""Masked acceptance: acceptance of drafts and sampling of the next token without arrays of the vocabulary's size.

Imports jax only. Start with `types.py`, then `kernels.py`; `kernels_pallas.ops` selects the implementation.
"""
