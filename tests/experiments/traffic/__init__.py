"""Tests of `bass_jax.experiments.traffic`."""
