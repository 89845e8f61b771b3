"""Acceptance of drafts and the draw of the next token; no array of the vocabulary's size is written.

Imports `kernels_pallas` alone. Start with `kernels_pallas.ops`.
"""
