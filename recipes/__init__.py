"""Pipelines that made what this repository ships. They are not part of the package `bass_jax`."""
