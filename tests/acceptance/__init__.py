"""Tests of `bass_jax.acceptance`."""
