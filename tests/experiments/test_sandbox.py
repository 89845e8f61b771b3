"""Hostile programs end as failures, without an effect on the machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bass_jax.experiments import sandbox
from bass_jax.experiments.sandbox import SandboxLimits, run_program, run_programs

LIMITS = SandboxLimits(seconds=1.0)
isolated = pytest.mark.usefixtures("bubblewrap")


@pytest.fixture(autouse=True)
def child_of_this_process(monkeypatch):
    """Lets `processes` tell the sandboxes of this test process from those of others."""
    monkeypatch.setattr(sandbox, "_CHILD", f"{sandbox._CHILD}# {os.getpid()}\n")


def processes() -> set[int]:
    """Returns the processes of this test's sandboxes, with what the programs started."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if sandbox._CHILD.encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def assert_nothing_is_left() -> None:
    """The kernel ends a process namespace within moments of its first process."""
    deadline = time.monotonic() + 5
    while processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes()


@isolated
def test_correct_programs_pass():
    program = (
        "import hashlib, math, random, threading\nopen('own.txt', 'w').write('x')\nassert open('own.txt').read() == 'x'"
    )
    assert run_program(program).passed
    assert run_program("print('x' * 10**6)").passed
    assert not run_program("assert 1 + 1 == 3, 'no'").passed
    assert "AssertionError" in run_program("assert 1 + 1 == 3, 'no'").reason


HOSTILE = {
    "an endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "many threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "100 GB": "bytearray(100 * 2**30)",
    "memory bit by bit": "hoard = []\nwhile True: hoard.append(bytearray(2**20))",
    "a full disk": "with open('big', 'wb') as file:\n    while True: file.write(bytes(2**20))",
    "many files": "for i in range(10**6): open(str(i), 'wb').write(bytes(2**20))",
    "an early exit": "import sys\nsys.exit(0)",
    "a silent exit": "import os\nos._exit(0)",
    "endless output": "while True: print('x' * 1000)",
    "output in place of the result": "import os\nwhile True:\n    for fd in range(64):\n"
    "        try: os.write(fd, b'started ' * 1000)\n        except OSError: pass",
    "another namespace": "import os\nos.unshare(os.CLONE_NEWUSER)",
    "another program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "another user": "import os\nos.setuid(0)",
    "nonsense": "def f(:",
}


@isolated
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_end_as_failures(name):
    start = time.monotonic()
    result = run_program(HOSTILE[name], LIMITS)
    assert not result.passed, result
    assert time.monotonic() - start < LIMITS.seconds + 8
    assert_nothing_is_left()


@isolated
def test_files_of_the_machine_cannot_be_deleted_or_written_or_seen(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("whole")
    for program in (
        f"import os\nos.remove({str(victim)!r})",
        f"open({str(victim)!r}, 'w')",
        f"open({str(victim)!r})",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"import os\nos.remove({os.__file__!r})",
        f"open({str(Path(sys.base_prefix) / 'planted')!r}, 'w')",
        "open('/planted', 'w')",
        "open('/etc/passwd')",
        "open('/proc/1/environ')",
        "open('/dev/zero')",
    ):
        assert not run_program(program, LIMITS).passed, program
    assert victim.read_text() == "whole" and Path(os.__file__).exists()
    assert not (Path(sys.base_prefix) / "planted").exists()


@isolated
def test_no_socket_reaches_a_server():
    """A server that listens on this machine receives no connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        result = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)", LIMITS)
        assert not result.passed and ("unreachable" in result.reason or "refused" in result.reason)
        with pytest.raises(TimeoutError):
            server.accept()


@isolated
def test_other_processes_cannot_be_killed():
    """Neither by id nor all together; and what a program leaves running ends with it."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert not run_program(f"import os\nos.kill({bystander.pid}, 9)", LIMITS).passed
        run_program("import os\nos.kill(-1, 9)", LIMITS)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    run_program(
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass\n", LIMITS
    )
    assert_nothing_is_left()


@isolated
def test_nothing_outlives_bubblewrap():
    def run() -> None:
        with contextlib.suppress(ValueError):  # bubblewrap is killed before the program starts, or after
            run_program("import time\ntime.sleep(1000)", SandboxLimits(seconds=30.0))

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 20
    while len(processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(min(processes()), signal.SIGKILL)
    thread.join()
    assert_nothing_is_left()


@isolated
def test_results_come_in_order():
    seen = []
    results = run_programs(["pass", "1 / 0", "pass"], LIMITS, on_result=lambda index, result: seen.append(index))
    assert [result.passed for result in results] == [True, False, True]
    assert seen == [0, 1, 2]


@pytest.fixture
def no_bubblewrap(monkeypatch):
    monkeypatch.setattr(sandbox, "bubblewrap_problem", lambda: "bwrap is not installed")


def test_without_bubblewrap_programs_are_refused(no_bubblewrap, tmp_path):
    planted = tmp_path / "ran"
    with pytest.raises(ValueError, match=r"bwrap is not installed; .*--inside-container"):
        run_program(f"open({str(planted)!r}, 'w')")
    assert not planted.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_as_root_programs_need_an_interpreter_that_others_can_execute(no_bubblewrap, monkeypatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.touch(mode=0o700)
    monkeypatch.setattr(sandbox, "INTERPRETER", interpreter)
    with pytest.raises(ValueError, match="cannot execute"):
        run_program("pass", inside_container=True)


LIMITED = ("an endless loop", "a fork bomb", "100 GB", "a full disk", "an early exit", "another user")


@pytest.mark.parametrize("name", [*LIMITED, "a correct program"])
def test_inside_a_container_the_resource_limits_hold(no_bubblewrap, monkeypatch, name):
    if os.geteuid() == 0 and not sandbox.is_executable_by_others(sandbox.INTERPRETER):
        other = Path("/usr/bin/python3").resolve()
        if not other.exists():
            pytest.skip(f"as root this needs an interpreter that others can execute, not {sandbox.INTERPRETER}")
        monkeypatch.setattr(sandbox, "INTERPRETER", other)
    start = time.monotonic()
    is_correct = name == "a correct program"
    program = "open('own.txt', 'w').write('x')" if is_correct else HOSTILE[name]
    result = run_program(program, None if is_correct else LIMITS, inside_container=True)
    assert result.passed == is_correct, result
    assert time.monotonic() - start < LIMITS.seconds + 8
    assert_nothing_is_left()


def test_limits_are_checked():
    with pytest.raises(ValueError, match="seconds=0"):
        SandboxLimits(seconds=0.0)
