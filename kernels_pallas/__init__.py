"""Pallas kernels for batched speculative decoding; usable without the rest of the project.

Imports jax and numpy alone. Public names:

* `ragged_attention`: a few new tokens per row attend to a KV cache whose rows have different lengths.
* `quantize_kv`: INT8 values with one scale per (token, head), the form `ragged_attention` reads back.
* `masked_acceptance`: which drafts stand and which token follows them, from the logits as they lie.
* `SamplingParams`, `Acceptance`: what it takes and what it gives.
"""

from kernels_pallas.acceptance.verdict import KernelAcceptance, KernelSampling
from kernels_pallas.attention.quantize import quantize_kv
from kernels_pallas.ops import masked_acceptance, ragged_attention

__all__ = ["KernelAcceptance", "KernelSampling", "masked_acceptance", "quantize_kv", "ragged_attention"]
