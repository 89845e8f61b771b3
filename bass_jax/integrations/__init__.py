"""Speculative decoding inside other libraries. Each module needs the library that it is named after.

Imports `bass_jax.engine` and lower packages.
"""
