"""Tests of `bass_jax.runtime`."""
