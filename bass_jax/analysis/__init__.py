"""Measurements and simulations: the profiler, the roofline benchmark, replay, the policy simulator, utilization.

Imports `bass_jax.engine` and lower packages. Start with `profiler.py`, which measures what a step costs, then
`simulator.py`, which replays a policy on a recorded trace.
"""
