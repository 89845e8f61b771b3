"""Tests that a user can run: whether decoding is lossless, and whether a user's own parts follow their protocols.

Imports `bass_jax.analysis` and lower packages. Start with `reference_decoder.py`, speculative decoding in the most
obvious way, then `lossless.py`.
"""

from bass_jax.testing.conformance import check_drafter, check_policy, check_rule
from bass_jax.testing.lossless import LosslessReport, verify_lossless
from bass_jax.testing.reference_decoder import logits_function, reference_decode
from bass_jax.testing.target_conformance import check_target
from bass_jax.testing.tiny_models import tiny_target

__all__ = [
    "LosslessReport",
    "check_drafter",
    "check_policy",
    "check_rule",
    "check_target",
    "logits_function",
    "reference_decode",
    "tiny_target",
    "verify_lossless",
]
