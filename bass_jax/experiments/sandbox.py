"""Runs programs that a model wrote where they can do no harm: another process, without network, files or time."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_CHILD = Path(__file__).with_name("cage_child.py")
_GRACE = 10.0
"""Seconds past the time limit after which the process that guards a program is ended itself."""


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """What a program may use.

    Attributes:
        seconds: of wall time, and of CPU time per process.
        memory: bytes of address space per process.
        disk: bytes in its temporary folder, which lives in memory.
        processes: at once, threads included.
    """

    seconds: float = 3.0
    memory: int = 512 * 2**20
    disk: int = 16 * 2**20
    processes: int = 8

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)}: expected a positive number")


class ProgramResult(NamedTuple):
    """How a program ended."""

    passed: bool  # it ran to its end and raised nothing
    reason: str  # "passed", "timed out", "killed by …", or the exception


def run_program(program: str, limits: SandboxLimits | None = None) -> ProgramResult:
    """Runs Python source in a sandbox of its own.

    The program sees an empty folder, the standard library and nothing else of this machine's files, all but the folder
    read-only; no network but a loopback that is down; no other process. It is ended with everything that it started.
    Linux namespaces and resource limits do this, as root or where users may make namespaces.

    Args:
        program: source; it passes if it ends without an exception (``exit`` is one).
        limits: default ``SandboxLimits()``.

    Raises:
        ValueError: if this machine cannot isolate it, with the reason; nothing was run then.
    """
    limits = limits or SandboxLimits()
    request = json.dumps({"program": program, "limits": dataclasses.asdict(limits)}).encode()
    # Some interpreters do not start without it.
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    # -I: neither the environment nor the working directory nor the user's packages are looked at.
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, cwd="/", env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        answer, _ = guard.communicate(request, timeout=limits.seconds + _GRACE)
    except subprocess.TimeoutExpired:
        return ProgramResult(False, "timed out")
    finally:
        if guard.poll() is None:
            os.killpg(guard.pid, signal.SIGKILL)
            guard.communicate()
    try:
        found = json.loads(answer)
    except ValueError:
        return ProgramResult(False, f"its guard ended with code {guard.returncode}")
    if "refused" in found:
        raise ValueError(f"this machine cannot isolate programs: {found['refused']}")
    return ProgramResult(found["passed"], found["reason"])


def run_programs(
    programs: Iterable[str],
    limits: SandboxLimits | None = None,
    *,
    on_result: Callable[[int, ProgramResult], None] = lambda index, result: None,
) -> list[ProgramResult]:
    """Runs programs, as many at once as there are cores; `on_result` is called in their order."""
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for index, result in enumerate(threads.map(functools.partial(run_program, limits=limits), programs)):
            results.append(result)
            on_result(index, result)
    return results


def check_sandbox() -> None:
    """Tries a sandbox on this machine.

    Raises:
        ValueError: if programs cannot be isolated here, or an innocent one does not pass.
    """
    result = run_program("assert sum(range(10)) == 45")
    if not result.passed:
        raise ValueError(f"this machine cannot run programs in isolation: {result.reason}")
