"""Measurements and simulations: profiler, roofline benchmark, policy simulator, utilization, quantization error.

Imports `bass_jax.engine` and lower packages. Start with `profiler.py`, which measures the time of a step, then
`simulator.py`, which runs a policy on a recorded trace.
"""
