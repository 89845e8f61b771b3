"""Pallas kernels for batched speculative decoding; usable without the rest of the project.

Imports jax and numpy only. Start with `ops.py`. Public names:

* `ragged_attention`: a few new tokens per row attend to a KV cache whose rows have different lengths.
* `quantize_kv`: INT8 values with one scale per (token, head), the form that `ragged_attention` reads.
* `masked_acceptance`: accepts drafts and samples the next token from logits.
* `KernelSampling`, `KernelAcceptance`: its sampling parameters and its result.
* `grouped_product`: multiplies every row by the matrix of its group, such as an expert.
"""

from kernels_pallas.acceptance.types import KernelAcceptance, KernelSampling
from kernels_pallas.attention.quantize import quantize_kv
from kernels_pallas.ops import grouped_product, masked_acceptance, ragged_attention

__all__ = [
    "KernelAcceptance",
    "KernelSampling",
    "grouped_product",
    "masked_acceptance",
    "quantize_kv",
    "ragged_attention",
]
