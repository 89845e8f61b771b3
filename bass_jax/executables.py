"""Compiled steps, kept so that compiling is timed apart and counted."""

import time
from collections.abc import Callable
from typing import Any

import jax

from bass_jax.config import SpecConfig
from bass_jax.pair import Pair
from bass_jax.state import SpecState, StepInfo
from bass_jax.step import decode_step, speculate_step

Step = Callable[[Pair, SpecState, SpecConfig], tuple[SpecState, StepInfo]]


class Executables:
    """Compiles a step once per function, `SpecConfig` and shapes.

    Attributes:
        num_compiled: executables made so far.
        compile_seconds: time spent on it.
    """

    def __init__(self):
        self._compiled: dict[Any, Callable] = {}
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def get(self, step: Step, pair: Pair, state: SpecState, spec: SpecConfig) -> Callable:
        """Returns ``(pair, state) -> (state, info)`` for arguments of these shapes; `state` is donated."""
        leaves, structure = jax.tree.flatten((pair, state))
        key = (step, spec, structure, tuple(jax.typeof(leaf) for leaf in leaves))
        if key not in self._compiled:
            start = time.perf_counter()

            def call(pair, state):
                return step(pair, state, spec)

            self._compiled[key] = jax.jit(call, donate_argnums=1).lower(pair, state).compile()
            self.num_compiled += 1
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]


EXECUTABLES = Executables()
"""Shared by `bass_jax.generate` and `bass_jax.stream`, so that a second batch compiles nothing."""

STEPS: dict[str, Step] = {"speculate": speculate_step, "decode": decode_step}
"""By the name that `bass_jax.generate` takes."""
