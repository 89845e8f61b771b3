"""Tests of `bass_jax.cost_model`."""
