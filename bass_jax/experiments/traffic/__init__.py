"""Traffic: requests that arrive over time, served by the engine's loop in real or in simulated time.

Imported by `bass_jax.cli`. Start with `traffic_config.py`, then `traffic_experiment.py`.
"""
