"""Tests for a user's own parts: `verify_lossless` compares the whole sampled decoder with the target's distribution.

Imports `bass_jax.engine` and lower packages. Start with `lossless.py`.
"""
