"""Tests of `bass_jax.testing`."""
