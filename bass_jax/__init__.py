"""Exact batched speculative decoding for JAX, of which every part can be replaced.

Start with `generate`. To drive the steps yourself, use `prefill` and `speculate_step`. The names of `__all__` are
grouped: decode, configure, extend, analyze.
"""

from bass_jax import acceptance, drafters, models, policies, testing
from bass_jax import analysis as analysis
from bass_jax import cost_model as cost_model
from bass_jax import decoding as decoding
from bass_jax import runtime as runtime
from bass_jax import sampling as sampling
from bass_jax.config import SpecConfig
from bass_jax.decoding import (
    DecodeOptions,
    FinishReason,
    Generation,
    ModelOptions,
    Pair,
    SpecState,
    StepInfo,
    decode_step,
    load_pair,
    output_tokens,
    prefill,
    speculate_step,
    summarize,
)
from bass_jax.engine import Engine, EngineConfig
from bass_jax.engine.generate import generate, stream
from bass_jax.sampling import SamplingParams
from bass_jax.testing import verify_lossless

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022
    # Decode
    "load_pair",
    "generate",
    "stream",
    "Pair",
    "Engine",
    "prefill",
    "speculate_step",
    "decode_step",
    "output_tokens",
    # Configure
    "SpecConfig",
    "SamplingParams",
    "DecodeOptions",
    "EngineConfig",
    "ModelOptions",
    # Extend
    "acceptance",
    "drafters",
    "models",
    "policies",
    "testing",
    # Analyze
    "FinishReason",
    "Generation",
    "SpecState",
    "StepInfo",
    "summarize",
    "verify_lossless",
]
