"""Compiled functions, kept so that compiling is timed apart and counted."""

import contextlib
import dataclasses
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from bass_jax.runtime.cpu_workarounds import CPU_COMPILE_TIME_OPTIONS, CPU_COMPILER_OPTIONS
from bass_jax.runtime.debug import is_debugging, raising, with_checks
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS

COMPILER_OPTIONS = ONE_GRAPH_OPTIONS | CPU_COMPILER_OPTIONS
"""Compiler options of every step."""

MAX_COMPILED = 512
"""Functions that are kept."""

MAX_MEMORY_MAPS = 40_000
"""Memory maps of the process at which functions are dropped. A step that is compiled for a CPU takes about 600 of the
65,530 that Linux allows; XLA's compiler crashes at the limit."""


@dataclasses.dataclass
class CompiledFunction:
    """A compiled function, and what is known of its run time.

    Attributes:
        call: the function.
        compile_seconds: time that its compilation took, including tracing and the first call.
        saved_seconds: time that the compilation cache on disk saved.
        is_ready: whether a thread that compiles it, if any, has ended. A call waits for it.
        is_prepared: whether it needs no first call; see `JitCache.get`.
        num_calls: measured calls; see `bass_jax.engine.step_clock`, as for the other attributes.
        seconds: estimated time of a call; NaN if it was not measured.
        resume_seconds: estimated further time of a step with drafts after steps without.
    """

    call: Callable
    compile_seconds: float
    saved_seconds: float = 0.0
    is_ready: Callable[[], bool] = lambda: True
    is_prepared: bool = False
    num_calls: int = 0
    seconds: float = float("nan")
    resume_seconds: float = float("nan")

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        return self.call(*arguments)


class JitCache:
    """Compiles a function once per structure and shapes of its arguments.

    The functions that were used least recently are dropped at `MAX_COMPILED` and at `MAX_MEMORY_MAPS`. An engine keeps
    those that it uses.

    Attributes:
        num_compiled: functions compiled so far.
        compile_seconds: time that callers waited for this, tracing included.
        run_seconds: time of the steps, which the executor adds, less that of the compilations since; at least 0.
    """

    def __init__(self):
        self._compiled: dict[Any, CompiledFunction] = {}
        self._on_compile: Callable[[Callable, tuple], None] | None = None
        self.num_compiled = 0
        self.compile_seconds = 0.0
        self.run_seconds = 0.0
        self._saved = _SavedSeconds()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("/compile_time_saved_sec"):
            self._saved.seconds += max(duration_secs, 0.0)

    def get(
        self,
        function: Callable,
        *args: Any,
        donate_argnums: tuple[int, ...] = (),
        prepare: bool = False,
        in_background: bool = False,
    ) -> CompiledFunction:
        """Returns `function` compiled for arguments of these shapes, placements and static parts.

        With `prepare`, a function that is compiled for a CPU is called once, with copies of what it donates. XLA for a
        CPU prepares every product in the first call: 0.2 to 0.3 s for a step of SmolLM2-135M (two cores, 2026-11-25).
        This counts as compilation, so that the calls of a step take equally long. Where an argument is a
        `jax.ShapeDtypeStruct`, a later call of `get` prepares the function.

        With `in_background`, only tracing is done here, and XLA compiles in a thread, which a process that exits waits
        for. The function can be called at once; the call then waits.
        """
        key, placements = _key(function, args, donate_argnums)
        found = self._compiled.pop(key, None)
        if found is None:
            if self._on_compile is not None:
                self._on_compile(function, args)
            start, saved_before = time.perf_counter(), self._saved.seconds
            mesh: Any = next((placement.mesh for placement in placements if placement is not None), None)
            # Code that spreads over a mesh asks which one is set.
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                traced = _renewed(with_checks(function) if is_debugging() else function)
                lowered = jax.jit(traced, donate_argnums=donate_argnums).lower(*args)
                compile_it = functools.partial(_compile, lowered, has_checks=is_debugging())
                if in_background:
                    found = self._in_background(compile_it)
                else:
                    found = CompiledFunction(compile_it(), 0.0, self._saved.seconds - saved_before)
            self._add_seconds(found, time.perf_counter() - start)
            self.num_compiled += 1
            self._make_room()
        self._compiled[key] = found  # The last one is the one that was used last.
        if prepare and not found.is_prepared:
            self._prepare(found, args, donate_argnums)
        return found

    def _add_seconds(self, compiled: CompiledFunction, seconds: float) -> None:
        compiled.compile_seconds += seconds
        self._count(seconds)

    def _count(self, seconds: float) -> None:
        self.compile_seconds += seconds
        self.run_seconds = max(self.run_seconds - seconds, 0.0)

    def _in_background(self, compile_it: Callable[[], Callable]) -> CompiledFunction:
        """Compiles in a thread; returns a function that waits for it."""
        from concurrent.futures import ThreadPoolExecutor  # Only where something is compiled, not at every import.

        def run() -> None:
            start = time.perf_counter()
            compiled = compile_it()
            found.compile_seconds += time.perf_counter() - start
            found.saved_seconds, found.call = self._saved.seconds, compiled  # The thread has compiled nothing else.

        def wait_and_call(*args):
            start = time.perf_counter()
            try:
                future.result()
            except BaseException:
                self._forget(found)
                raise
            self._count(time.perf_counter() - start)
            return found.call(*args)

        found = CompiledFunction(wait_and_call, 0.0)
        thread = ThreadPoolExecutor(1)
        future = thread.submit(run)
        thread.shutdown(wait=False)
        found.is_ready = future.done
        return found

    def _forget(self, compiled: CompiledFunction) -> None:
        """Drops a function whose compilation has failed, so that it is tried again."""
        num_before = len(self._compiled)
        self._compiled = {key: kept for key, kept in self._compiled.items() if kept is not compiled}
        self.num_compiled -= num_before - len(self._compiled)

    def _prepare(self, compiled: CompiledFunction, args: tuple, donate_argnums: tuple[int, ...]) -> None:
        if jax.default_backend() == "cpu":
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
                return
            start = time.perf_counter()
            copied = (jax.tree.map(_copy, arg) if i in donate_argnums else arg for i, arg in enumerate(args))
            jax.block_until_ready(compiled(*copied))
            self._add_seconds(compiled, time.perf_counter() - start)
        compiled.is_prepared = True

    def _make_room(self) -> None:
        """Drops the functions that were used least recently."""
        num_kept = MAX_COMPILED - 1
        if jax.default_backend() == "cpu" and num_memory_maps() > MAX_MEMORY_MAPS:
            num_kept = len(self._compiled) // 2
        if len(self._compiled) > num_kept:
            for key in list(self._compiled)[: len(self._compiled) - num_kept]:
                del self._compiled[key]
            gc.collect()  # Compiled functions are parts of reference cycles.

    @contextlib.contextmanager
    def reporting_to(self, on_compile: Callable[[Callable, tuple], None]) -> Iterator[None]:
        """Calls `on_compile` with a function and its arguments before each compilation, to tell a user who waits."""
        before, self._on_compile = self._on_compile, on_compile
        try:
            yield
        finally:
            self._on_compile = before

    def find(self, function: Callable, *args: Any, donate_argnums: tuple[int, ...] = ()) -> CompiledFunction | None:
        """Returns what `get` would return if it is compiled already."""
        return self._compiled.get(_key(function, args, donate_argnums)[0])

    def clear(self) -> None:
        """Forgets all compiled functions; those that are asked for again are compiled again."""
        self._compiled.clear()


def _copy(leaf: Any) -> Any:
    """Copies an array. On the devices of this process it compiles nothing, unlike `jnp.copy`."""
    if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
        return jnp.copy(leaf)
    return jax.device_put(leaf, leaf.sharding, may_alias=False)  # Without the placement, keys on a mesh are not copied.


class _SavedSeconds(threading.local):
    """Time that the compilation cache on disk has saved in this thread, in all of jax."""

    seconds = 0.0


def _compile(lowered: Any, *, has_checks: bool) -> Callable:
    # jax's option is for level 0, which an option given here would replace.
    sets_level = jax.default_backend() == "cpu" and not jax.config.read("jax_disable_most_optimizations")
    options = COMPILER_OPTIONS | (CPU_COMPILE_TIME_OPTIONS if sets_level else {})
    compiled = lowered.compile(compiler_options=options)
    return raising(compiled) if has_checks else compiled


def _renewed(function: Callable) -> Callable:
    """Returns a new function that does the same. jax keeps compiled code as long as the function that it jitted."""

    def renewed(*args):
        return function(*args)

    renewed.__name__ = getattr(function, "__name__", "function")
    return renewed


def _key(function: Callable, args: tuple, donate_argnums: tuple[int, ...]) -> tuple[Any, tuple]:
    """Returns the key of a compiled function, and the placements of its arguments."""
    leaves, structure = jax.tree.flatten(args)
    placements = tuple(_placement(leaf) for leaf in leaves)
    types = tuple(jax.typeof(leaf) for leaf in leaves)
    return (function, donate_argnums, structure, types, placements, is_debugging()), placements


def _placement(leaf: Any) -> NamedSharding | None:
    """How an array lies on several devices; None on one."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def num_memory_maps() -> int:
    """Returns the number of memory maps of this process; 0 where the system does not tell."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


JIT_CACHE = JitCache()
"""Shared by prefill and the loops, so that a second batch of the same buckets compiles nothing."""
