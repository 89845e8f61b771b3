"""Tests of bass_jax.serving."""
