"""Tests of `bass_jax.models`."""
