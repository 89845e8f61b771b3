"""Compiled functions, kept so that compiling is timed apart and counted."""

import time
from collections.abc import Callable
from typing import Any

import jax

from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS


class Executables:
    """Compiles a function once per structure and shapes of its arguments.

    Attributes:
        num_compiled: executables made so far.
        compile_seconds: time spent on it.
    """

    def __init__(self):
        self._compiled: dict[Any, Callable] = {}
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def get(self, function: Callable, *args: Any, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """Returns `function` compiled for arguments of these shapes and static parts."""
        leaves, structure = jax.tree.flatten(args)
        key = (function, donate_argnums, structure, tuple(jax.typeof(leaf) for leaf in leaves))
        if key not in self._compiled:
            start = time.perf_counter()
            lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*args)
            self._compiled[key] = lowered.compile(compiler_options=ONE_GRAPH_OPTIONS)
            self.num_compiled += 1
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]

    def clear(self) -> None:
        """Forgets all executables; what is asked for again is compiled again."""
        self._compiled.clear()


EXECUTABLES = Executables()
"""Shared by prefill and the loops, so that a second batch of the same buckets compiles nothing."""
