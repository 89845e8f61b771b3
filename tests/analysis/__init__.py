"""Tests of `bass_jax.analysis`."""
