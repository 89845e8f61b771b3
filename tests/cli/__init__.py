"""Tests of `bass_jax.cli`."""
