"""Tests of `bass_jax.decoding`."""
