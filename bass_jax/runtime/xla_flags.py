"""What a process sets before it uses a device: XLA's flags for a GPU, and a cache of compiled code on disk."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from bass_jax.runtime.files import user_cache
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS

GPU_FLAGS: Mapping[str, str | int] = ONE_GRAPH_OPTIONS
"""XLA flags that `configure_gpu` sets, by name without the dashes. `docs/how_to/speed.md` describes each of them, and
which others keep their defaults."""


def configure_gpu(
    *, memory_fraction: float | None = None, cache: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """Sets what makes a step fast on a GPU: for callers who jit steps themselves; `bass_jax.generate` needs none of it.

    Flags that the user has set in ``XLA_FLAGS`` are left as they are. Call it before anything uses a device.

    Args:
        memory_fraction: share of the device's memory that jax takes at once when it starts, above 0 and at most 1;
            default jax's, three quarters.
        cache: directory for `use_compilation_cache`.

    Returns:
        What was set: names of flags, environment variables and settings with their values.

    Raises:
        ValueError: if a device has been used already, or `memory_fraction` is out of range.
    """
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction}: expected above 0 and at most 1")
    if _is_started():
        raise ValueError("configure_gpu: a device is in use already; call it before anything makes an array")
    present = os.environ.get("XLA_FLAGS", "")
    names = {flag.lstrip("-").split("=")[0] for flag in present.split()}
    changes = {name: str(value) for name, value in GPU_FLAGS.items() if name not in names}
    os.environ["XLA_FLAGS"] = " ".join([present, *(f"--{name}={value}" for name, value in changes.items())]).strip()
    if memory_fraction is not None:
        changes["XLA_PYTHON_CLIENT_MEM_FRACTION"] = os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction)
    directory = use_compilation_cache(cache)
    return changes if directory is None else changes | {"jax_compilation_cache_dir": str(directory)}


def use_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Keeps compiled code on disk, so that a second start compiles nothing; on a GPU the tuning of products too.

    Args:
        directory: where; default ``bass_jax`` in the user's cache directory. Under it lies one directory per kind of
            processor, because code for a CPU runs on that kind alone.

    Returns:
        The directory in use: one that jax was told of before is kept, unless `directory` is given. None where jax was
        told to use none.
    """
    if not jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    present = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if directory is None and present:
        return Path(present)
    root = Path(directory) if directory is not None else user_cache()
    path = root / f"xla-{_processor()}"
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Everything is kept: what is small is many.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def _processor() -> str:
    """A name of what the CPU can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else [os.uname().machine]
    described = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join(described or lines[:1]).encode()).hexdigest()[:12]


def _is_started() -> bool:
    from jax._src import xla_bridge  # There is no public way to ask without starting one.

    return xla_bridge.backends_are_initialized()
