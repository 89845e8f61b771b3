"""Tests of `bass_jax.checkpoint`."""
