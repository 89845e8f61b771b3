"""Pallas kernels for batched speculative decoding; usable without the rest of the project.

Imports jax and numpy alone. Public names:

* `ragged_attention`: a few new tokens per row attend to a KV cache whose rows have different lengths.
* `quantize_kv`: INT8 values with one scale per (token, head), the form `ragged_attention` reads back.
"""

from kernels_pallas.ops import quantize_kv, ragged_attention

__all__ = ["quantize_kv", "ragged_attention"]
