"""Tests of `bass_jax.integrations`."""
