"""Runs programs that a model wrote, isolated by bubblewrap (``bwrap``) and under resource limits."""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

INTERPRETER = Path(sys.executable).resolve()
_JAIL = "/jail"

# The process that becomes the program. After chroot, the kernel lets it make no user namespace.
_CHILD = """
import json, os, resource, sys
request = json.load(sys.stdin)
output, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
for name, value in request["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
if request["jail"]:
    os.chroot(request["jail"])
    os.chdir("/work")
if request["user"]:
    os.setgroups([])
    os.setresgid(*3 * [request["user"]])
    os.setresuid(*3 * [request["user"]])
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
os.write(output, b"started ")
process = os.getpid()
try:
    exec(compile(request["program"], "program", "exec"), {"__name__": "__main__"})
    result = request["token"]
except BaseException as error:
    result = f"{type(error).__name__}: {error}"
if os.getpid() == process:  # Forks of the program get here too.
    os.write(output, result.encode("utf-8", "replace")[:200])
os._exit(0)
"""


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """What a program may use.

    Attributes:
        seconds: wall time, and CPU time per process.
        memory: bytes of address space per process.
        disk: bytes in its working directory, which is kept in memory. No file exceeds 4 MiB.
        processes: processes at once, threads included.
    """

    seconds: float = 3.0
    memory: int = 512 * 2**20
    disk: int = 16 * 2**20
    processes: int = 8

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value}: expected a positive number")


class ProgramResult(NamedTuple):
    """How a program ended."""

    passed: bool  # it ran to its end without an exception
    reason: str  # "passed", "timed out", "killed by …", or the exception


def run_program(program: str, limits: SandboxLimits | None = None, *, inside_container: bool = False) -> ProgramResult:
    """Runs Python source in a sandbox of its own, and ends everything that it started.

    The program has an empty working directory, no network, and sees no other process. Of this machine's files it can
    read the standard library and ``/usr``, and write none.

    Args:
        program: source; it passes if it ends without an exception (``exit`` raises one).
        limits: default ``SandboxLimits()``.
        inside_container: the caller runs in a container of their own. If bubblewrap cannot be used, the program then
            runs under the resource limits alone, without `disk`.

    Raises:
        ValueError: if programs cannot be isolated here; the program was not run then.
    """
    limits, is_root, problem = limits or SandboxLimits(), os.geteuid() == 0, bubblewrap_problem()
    if problem and not inside_container:
        hint = "install bubblewrap, or pass --inside-container in a container of your own"
        raise ValueError(f"programs cannot be isolated: {problem}; {hint}")
    if problem and is_root and not is_executable_by_others(INTERPRETER):
        raise ValueError(f"programs run as another user than root, who cannot execute {INTERPRETER}")
    token = secrets.token_hex()  # Proves that the program reached its end.
    request = {
        "program": program,
        "token": token,
        "jail": _JAIL if is_root and not problem else None,
        # The limit on processes is counted per user and does not apply to root. The ids are those that systemd
        # reserves for users of one service.
        "user": 61_184 + secrets.randbelow(4_336) if is_root else None,
        "limits": {
            "RLIMIT_CPU": int(limits.seconds + 1),
            "RLIMIT_AS": limits.memory,
            "RLIMIT_FSIZE": min(limits.disk, 4 * 2**20),
            "RLIMIT_NPROC": limits.processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        },
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as stdin:
        json.dump(request, stdin)
        stdin.seek(0)
        if is_root:
            os.chown(folder, request["user"], request["user"])
        process = subprocess.Popen(
            [*([] if problem else _bubblewrap(limits.disk)), str(INTERPRETER), "-I", "-S", "-B", "-c", _CHILD],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
            start_new_session=True,
        )
        code, output = None, b""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limits.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        with process.stdout as pipe, contextlib.suppress(BlockingIOError):
            os.set_blocking(pipe.fileno(), False)  # Processes that the program started may still hold the pipe.
            output = os.read(pipe.fileno(), 4096)
    message, is_started, result = output.decode("utf-8", "replace").partition("started ")
    if code is not None and not is_started:
        raise ValueError(f"programs cannot be isolated: {' '.join(message.split()) or f'exit code {code}'}")
    if result == token:
        return ProgramResult(True, "passed")
    if code is None:
        return ProgramResult(False, "timed out")
    number = -code if code < 0 else code - 128  # bwrap adds 128 to the signal that killed its program.
    how = f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else "ended without a result"
    return ProgramResult(False, result[:200] or how)


def is_executable_by_others(file: Path) -> bool:
    """Returns whether every user can execute a file."""
    return all(path.stat().st_mode & 1 for path in (file, *file.parents))


def _bubblewrap(disk: int) -> list[str]:
    """Returns the command that goes before a program's interpreter."""
    command = ["bwrap", "--die-with-parent"]
    command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    jail = _JAIL if os.geteuid() == 0 else ""
    if jail:
        command += ["--cap-drop", "ALL"]
        command += [word for name in ("SETUID", "SETGID", "SYS_CHROOT") for word in ("--cap-add", f"CAP_{name}")]
    else:
        command += ["--unshare-user", "--disable-userns"]
    for root in ("", jail) if jail else ("",):
        for path in dict.fromkeys(("/usr", "/lib", "/lib64", str(Path(sys.base_prefix).resolve()))):
            command += ["--dir", f"{root}{path}", "--ro-bind-try", path, f"{root}{path}"]
        command += ["--dir", f"{root}/dev", "--dev-bind", "/dev/null", f"{root}/dev/null"]
    command += ["--perms", "0777", "--size", str(disk), "--tmpfs", f"{jail}/work", "--chdir", f"{jail}/work"]
    return [*command, "--remount-ro", "/", "--"]


@functools.cache
def bubblewrap_problem() -> str:
    """Returns why bubblewrap cannot be used on this machine, or an empty text."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    command = [*_bubblewrap(2**20), str(INTERPRETER), "-I", "-S", "-c", ""]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return "" if done.returncode == 0 else " ".join(done.stderr.split()) or f"bwrap ended with {done.returncode}"


def run_programs(
    programs: Iterable[str],
    limits: SandboxLimits | None = None,
    *,
    inside_container: bool = False,
    on_result: Callable[[int, ProgramResult], None] = lambda index, result: None,
) -> list[ProgramResult]:
    """Runs programs, as many at once as there are cores; `on_result` is called in their order."""
    run = functools.partial(run_program, limits=limits, inside_container=inside_container)
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for index, result in enumerate(threads.map(run, programs)):
            results.append(result)
            on_result(index, result)
    return results
