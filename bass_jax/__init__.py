"""Exact batched speculative decoding for JAX, of which every part can be replaced.

Start with `generate`. To drive the steps yourself, use `prefill` and `speculate_step`. The names of `__all__` are
grouped: decode, configure, extend, analyze. Each is imported when it is first used, so that a command that needs no
model starts without jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from bass_jax.runtime.debug import debug_checks as debug_checks
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

_PACKAGES = {"acceptance", "drafters", "models", "policies", "testing"} | {
    "analysis",
    "cost_model",
    "decoding",
    "runtime",
    "sampling",
}
"""Packages that are imported when they are first used: those of `__all__`, and some that examples use."""

_MODULES = {
    "Engine": "engine",
    "EngineConfig": "engine",
    "SamplingParams": "sampling",
    "SpecConfig": "config",
    "debug_checks": "runtime.debug",
    "generate": "engine.generate",
    "stream": "engine.generate",
    "verify_lossless": "testing",
}
"""Where a public name is defined; the others are in `bass_jax.decoding`. `debug_checks` is for development only."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"bass_jax.{name}")
    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module 'bass_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"bass_jax.{_MODULES.get(name, 'decoding')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
