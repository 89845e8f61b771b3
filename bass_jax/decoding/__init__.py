"""One step of a batch and its state: prefill, `speculate_step`, `decode_step`, baselines, outputs, metrics, traces.

Imports `bass_jax.policies` and lower packages. Start with `state.py`, what a step reads and returns, then `step.py`,
the step itself, then `accept.py`.
"""
