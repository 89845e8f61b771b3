"""Tests of `bass_jax.engine`."""
