"""The environment of a run: versions, device, commit."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("bass-jax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


def describe_environment() -> dict[str, Any]:
    """Returns what a reader of a measurement needs to know about the machine, ready for JSON."""
    devices, versions, processor = jax.devices(), {}, platform.processor()
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
        "platform": platform.platform(),
        "processor": processor,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "git": _describe_git(Path(__file__)),
    }


def _describe_git(file: Path) -> dict[str, Any] | None:
    """Returns the commit of the repository that tracks `file` and whether it has changes; None without a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # A virtual environment may lie inside another repository.
        return {"commit": git("rev-parse", "HEAD"), "has_changes": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
