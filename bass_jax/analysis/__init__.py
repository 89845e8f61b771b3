"""Measurements and simulations: profiler, roofline benchmark, policy simulator, utilization, quantization error.

Imports `bass_jax.engine` and lower packages. Start with `profiler.py`, which measures the time of a step, then
`simulator.py`, which runs a policy on a recorded trace.
"""

from bass_jax.analysis.profiler import measure_profile
from bass_jax.analysis.quantization_error import QuantizationError, measure_quantization_error
from bass_jax.analysis.replay import Replay, make_replay
from bass_jax.analysis.simulator import Simulation, simulate
from bass_jax.analysis.utilization import Utilization, measure_utilization

__all__ = [
    "QuantizationError",
    "Replay",
    "Simulation",
    "Utilization",
    "make_replay",
    "measure_profile",
    "measure_quantization_error",
    "measure_utilization",
    "simulate",
]
