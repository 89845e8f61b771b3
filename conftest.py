"""Set-up of every test: devices, compiler options, checked annotations, markers, and the collection of code blocks."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import jaxtyping
import pytest

from tests.annotations import checked

MAX_MAPS = 36_000
"""Memory maps at which compiled code is dropped. A step takes about 600 of the 65,530 that Linux allows a process.

They are fewer than `bass_jax.runtime.jit_cache.MAX_MEMORY_MAPS`, so that no function is dropped within a test.
"""
maps_counted = 0.0

# Two workers on two processors slow each other down: XLA's threads of one wait for those of the other. Pinned to one
# processor each, the quick tests of decoding, drafters and the engine take 148 and 158 s instead of 172 and 168 s.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0))
if WORKERS > 1 and hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) == WORKERS:
    own = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[own]})

# These variables are set before anything imports jax. Processes that a test starts inherit them.
if "--gpu" not in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Four CPU devices, so that meshes can be tested on any machine.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    # Most of the tests' time is compilation, so workers and later runs share compiled code.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # LLVM's optimizations take more than half of the compile time. Tests marked `optimized` compile with them.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# The slow tests of these files take 11 to 26 minutes each. `make test-all` starts them first, so that no worker is left
# with one of them at the end.
LONG_FILES = {
    "test_quickstart.py",
    "test_decoder_distribution.py",
    "test_config_edits.py",
    "test_steps_of_shapes_compile_for_gpus.py",
    "test_all_drafters.py",
}

# Annotations are checked where arrays are annotated. A check costs more than most functions of the host's code do.
ANNOTATED = "acceptance analysis decoding drafters engine.slots models policies sampling training"
CHECKER = f"{checked.__module__}.{checked.__name__}"
jaxtyping.install_import_hook([f"bass_jax.{name}" for name in ANNOTATED.split()], CHECKER)
# Tracing creates millions of objects and hardly any garbage.
gc.set_threshold(100_000, 20, 20)


def pytest_collect_file(file_path, parent):
    """Collects the code blocks of README.md and of the pages in docs."""
    if file_path.suffix == ".md":
        from tests import snippets

        return snippets.collect(file_path, parent)
    return None


def pytest_addoption(parser):
    """Adds the option ``--gpu``."""
    parser.addoption("--gpu", action="store_true", help="run on the NVIDIA GPU, including the tests marked gpu")


def pytest_collection_modifyitems(config, items):
    """Marks the Python of slow pages, skips tests that need a GPU, and puts the longest files first."""
    from tests.snippets import is_slow

    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
    if not config.getoption("--gpu"):
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run pytest --gpu where there is one")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Chooses the compiler's optimizations, before fixtures compile anything."""
    import jax

    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "true":
        jax.config.update("jax_disable_most_optimizations", "optimized" not in item.keywords)


@pytest.fixture(scope="session", autouse=True)
def compiler_threads_first():
    """Gives the thread that runs the tests a lower priority than the compiler's threads.

    XLA for a CPU emits kernels in this thread and compiles them in others. If they fall behind, it creates an MLIR
    context per waiting kernel, which takes as long as compiling one: a quarter of the tests' CPU time.
    """
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jax.jit(lambda value: jnp.sin(value) + 1)(jnp.ones(3)))  # starts the compiler's threads
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


@pytest.fixture(autouse=True)
def bound_memory_maps():
    """Drops compiled functions if the process holds many memory maps, counted every 5 s: counting takes 20 to 50 ms.

    XLA's compiler crashes in a process that reaches Linux's limit.
    """
    global maps_counted
    yield
    now = time.monotonic()
    if now < maps_counted + 5:
        return
    from bass_jax.runtime.jit_cache import JIT_CACHE, num_memory_maps

    maps_counted = now
    if num_memory_maps() > MAX_MAPS:
        import jax

        JIT_CACHE.clear()
        jax.clear_caches()
        gc.collect()
