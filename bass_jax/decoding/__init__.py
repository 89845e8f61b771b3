"""One step of a batch and its state: prefill, `speculate_step`, `decode_step`, baselines, outputs, metrics, traces.

Imports `bass_jax.policies` and lower packages. Start with `state.py`, what a step reads and returns, then `step.py`,
the step itself, then `accept.py`.
"""

from bass_jax.decoding.device_loop import generate_on_device
from bass_jax.decoding.load_pair import ModelOptions, load_pair, random_pair
from bass_jax.decoding.metrics import Metrics, PerTokenLatency, per_token_latency, summarize
from bass_jax.decoding.options import DecodeOptions
from bass_jax.decoding.outputs import Generation, StreamEvent, Timings
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.state import FinishReason, SpecState, StepInfo, TokenLogprobs, output_tokens
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.decoding.traces import TracedRun, TraceWriter, read_trace

__all__ = [
    "DecodeOptions",
    "FinishReason",
    "Generation",
    "Metrics",
    "ModelOptions",
    "Pair",
    "PerTokenLatency",
    "SpecState",
    "StepInfo",
    "StreamEvent",
    "Timings",
    "TokenLogprobs",
    "TraceWriter",
    "TracedRun",
    "decode_step",
    "generate_on_device",
    "load_pair",
    "output_tokens",
    "per_token_latency",
    "prefill",
    "random_pair",
    "read_trace",
    "speculate_step",
    "summarize",
]
