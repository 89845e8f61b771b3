"""Compiled functions, kept so that compiling is timed apart and counted."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from bass_jax.runtime.cpu_workarounds import CPU_COMPILER_OPTIONS
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS

COMPILER_OPTIONS = ONE_GRAPH_OPTIONS | CPU_COMPILER_OPTIONS
"""Compiler options of every step."""


class JitCache:
    """Compiles a function once per structure and shapes of its arguments.

    Attributes:
        num_compiled: functions compiled so far.
        compile_seconds: time that this took, tracing included.
    """

    def __init__(self):
        self._compiled: dict[Any, Callable] = {}
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def get(self, function: Callable, *args: Any, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """Returns `function` compiled for arguments of these shapes, placements and static parts."""
        leaves, structure = jax.tree.flatten(args)
        placements = tuple(_placement(leaf) for leaf in leaves)
        key = function, donate_argnums, structure, tuple(jax.typeof(leaf) for leaf in leaves), placements
        if key not in self._compiled:
            start = time.perf_counter()
            mesh: Any = next((placement.mesh for placement in placements if placement is not None), None)
            # Code that spreads over a mesh asks which one is set.
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*args)
                self._compiled[key] = lowered.compile(compiler_options=COMPILER_OPTIONS)
            self.compile_seconds += time.perf_counter() - start
            self.num_compiled += 1
        return self._compiled[key]

    def clear(self) -> None:
        """Forgets all compiled functions; those that are asked for again are compiled again."""
        self._compiled.clear()


def _placement(leaf: Any) -> NamedSharding | None:
    """How an array lies on several devices; None on one."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


JIT_CACHE = JitCache()
"""Shared by prefill and the loops, so that a second batch of the same buckets compiles nothing."""
