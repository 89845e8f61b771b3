"""Attention of a few new tokens per row over a KV cache with one length per row.

Imports `kernels_pallas` alone. Start with `kernels_pallas.ops`, which chooses the kernel.
"""
