"""Programs that mean harm come to nothing, and the machine is as it was."""

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

LIMITS = SandboxLimits(seconds=1.5)


@pytest.fixture(scope="module", autouse=True)
def isolation():
    try:
        sandbox.check_sandbox()
    except ValueError as error:
        pytest.skip(f"programs cannot be isolated here: {error}")


def processes() -> set[int]:
    """Processes of cages, and what they started, wherever they are."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"sandbox_child" in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def test_innocent_programs_pass():
    program = (
        "import hashlib, math, random, threading\nopen('own.txt', 'w').write('x')\nassert open('own.txt').read() == 'x'"
    )
    assert run_program(program).passed
    assert not run_program("assert 1 + 1 == 3, 'no'").passed
    assert "AssertionError" in run_program("assert 1 + 1 == 3, 'no'").reason


HOSTILE = {
    "an endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a bomb of threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "100 GB": "bytearray(100 * 2**30)",
    "memory bit by bit": "hoard = []\nwhile True: hoard.append(bytearray(2**20))",
    "a full disk": "with open('big', 'wb') as file:\n    while True: file.write(bytes(2**20))",
    "many files": "for i in range(10**6): open(str(i), 'wb').write(bytes(2**20))",
    "an early exit": "import sys\nsys.exit(0)",
    "a silent exit": "import os\nos._exit(0)",
    "endless output": "while True: print('x' * 1000)",
    "another namespace": "import os\nos.unshare(os.CLONE_NEWUSER)",
    "another program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "nonsense": "def f(:",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_end_as_failures(name):
    start = time.monotonic()
    result = run_program(HOSTILE[name], LIMITS)
    assert not result.passed, result
    assert time.monotonic() - start < LIMITS.seconds + 8
    assert not processes()


def test_files_of_the_machine_can_neither_be_deleted_nor_written_nor_seen(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("whole")
    for program in (
        f"import os\nos.remove({str(victim)!r})",
        f"open({str(victim)!r}, 'w')",
        f"open({str(victim)!r})",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"import os\nos.remove({os.__file__!r})",
        f"open({str(Path(sys.base_prefix) / 'planted')!r}, 'w')",
        "open('/etc/passwd')",
        "open('/proc/1/environ')",
        "open('/dev/zero')",
    ):
        assert not run_program(program, LIMITS).passed, program
    assert victim.read_text() == "whole" and Path(os.__file__).exists()
    assert not (Path(sys.base_prefix) / "planted").exists()


def test_no_socket_reaches_anybody():
    """A server that listens on this machine hears nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        result = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)", LIMITS)
        assert not result.passed and "unreachable" in result.reason
        with pytest.raises(TimeoutError):
            server.accept()


def test_other_processes_cannot_be_touched():
    """Neither by name nor all at once; and what a program leaves behind ends with it."""
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
    assert not processes()


def test_nothing_outlives_a_guard_that_was_killed():
    thread = threading.Thread(target=run_program, args=("import time\ntime.sleep(1000)", SandboxLimits(seconds=30.0)))
    thread.start()
    deadline = time.monotonic() + 20
    while len(processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(min(processes()), signal.SIGKILL)
    thread.join()
    while processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes()


def test_verdicts_come_in_order():
    seen = []
    results = run_programs(["pass", "1 / 0", "pass"], LIMITS, on_result=lambda index, result: seen.append(index))
    assert [result.passed for result in results] == [True, False, True]
    assert seen == [0, 1, 2]


def test_a_machine_without_namespaces_is_refused(monkeypatch, tmp_path):
    """Nothing runs where nothing isolates."""
    planted = tmp_path / "ran"
    child = tmp_path / "child.py"
    source = Path(sandbox.__file__).with_name("sandbox_child.py").read_text()
    child.write_text(source.replace("os.unshare(flags)", "raise OSError(1, 'Operation not permitted')").replace(
        "os.unshare(flags | os.CLONE_NEWUSER)", "raise OSError(1, 'Operation not permitted')"))  # fmt: skip
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(ValueError, match="cannot isolate programs: namespaces"):
        run_program(f"open({str(planted)!r}, 'w')")
    assert not planted.exists()


def test_limits_are_checked():
    with pytest.raises(ValueError, match="seconds=0"):
        SandboxLimits(seconds=0.0)
