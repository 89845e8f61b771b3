"""Compiled functions, kept so that compiling is timed apart and counted."""

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS

CPU_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
"""Compiler options for a CPU; XLA for a GPU ignores them.

With XLA's own choice of 256 bits a product with one row, which one core computes, reads less than that core can; where
vectors have 256 bits this changes nothing."""


COMPILER_OPTIONS = ONE_GRAPH_OPTIONS | CPU_OPTIONS
"""What every step is compiled with."""

_MAX_THREADS = 4
"""That compile at a time: each compilation uses several cores and much memory by itself."""


class _Compiled(NamedTuple):
    """A compiled function, or one that is being compiled."""

    results: Any  # shapes of what it returns
    future: Future[Callable]  # the compiled function


class JitCache:
    """Compiles a function once per structure and shapes of its arguments.

    Attributes:
        num_compiled: executables that callers have got so far.
        compile_seconds: time that callers have spent on it, waiting included.
    """

    def __init__(self):
        self._made: dict[Any, _Compiled] = {}
        self._got: set[Any] = set()
        self.num_compiled = 0
        self.compile_seconds = 0.0

    def get(self, function: Callable, *args: Any, donate_argnums: tuple[int, ...] = ()) -> Callable:
        """Returns `function` compiled for arguments of these shapes and static parts, once it is."""
        key = _key(function, args, donate_argnums)
        if key not in self._made:
            self._make(key, function, args, donate_argnums, _call)
        future = self._made[key].future
        is_done, start = future.done(), time.perf_counter()
        try:
            compiled = future.result()
        except BaseException:
            del self._made[key]
            raise
        if not is_done:
            self.compile_seconds += time.perf_counter() - start
        if key not in self._got:
            self._got.add(key)
            self.num_compiled += 1
        return compiled

    def begin(self, function: Callable, *args: Any, donate_argnums: tuple[int, ...] = ()) -> Any:
        """Traces `function` and lets another thread compile it; `get` returns it.

        Args:
            function: to compile.
            args: as for `get`; arrays can be `jax.ShapeDtypeStruct`.
            donate_argnums: of `jax.jit`.

        Returns:
            What it will return, as `jax.ShapeDtypeStruct`.
        """
        key = _key(function, args, donate_argnums)
        if key not in self._made:
            self._make(key, function, args, donate_argnums, self._threads.submit)
        return self._made[key].results

    @functools.cached_property
    def _threads(self) -> concurrent.futures.Executor:
        return concurrent.futures.ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="compile")

    def _make(self, key: Any, function: Callable, args: Any, donate_argnums: tuple[int, ...], submit: Callable) -> None:
        """Traces here, and compiles where `submit` does."""
        start = time.perf_counter()
        placements = key[-1]
        mesh: Any = next((placement.mesh for placement in placements if placement is not None), None)

        def inside(call: Callable) -> Any:
            # Code that spreads over a mesh asks which one is set.
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                return call()

        lowered = inside(lambda: jax.jit(function, donate_argnums=donate_argnums).lower(*args))
        future = submit(inside, lambda: lowered.compile(compiler_options=COMPILER_OPTIONS))
        self._made[key] = _Compiled(lowered.out_info, future)
        self.compile_seconds += time.perf_counter() - start

    def clear(self) -> None:
        """Forgets all executables; what is asked for again is compiled again."""
        self._made.clear()
        self._got.clear()


def _key(function: Callable, args: Any, donate_argnums: tuple[int, ...]) -> Any:
    """All that a compiled function depends on; placements come last."""
    leaves, structure = jax.tree.flatten(args)
    placements = tuple(_placement(leaf) for leaf in leaves)
    return function, donate_argnums, structure, tuple(jax.typeof(leaf) for leaf in leaves), placements


def _call(function: Callable, *args: Any) -> Future[Callable]:
    """Calls it at once: what `ThreadPoolExecutor.submit` does later."""
    future: Future[Callable] = Future()
    future.set_result(function(*args))
    return future


def _placement(leaf: Any) -> NamedSharding | None:
    """How an array lies on several devices; None on one."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


JIT_CACHE = JitCache()
"""Shared by prefill and the loops, so that a second batch of the same buckets compiles nothing."""
