"""The inside of a sandbox; run as a script by `bass_jax.experiments.sandbox`, with the standard library alone.

Three processes: the guard, which makes the namespaces and keeps the time; under it the first process of a new process
namespace, with whose end everything dies that it started; that one runs the program.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

NOBODY = 65534
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD, MNT_DETACH = 442, 0x8000, -100, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 4, 38, 24
CAPABILITY_VERSION = 0x20080522
MAX_ANSWER = 4096
MAX_FILE = 4 * 2**20
BASE = "/tmp"
"""Where the new root is put together: a tmpfs of this mount namespace alone, so nothing is left of it."""
ROOT = f"{BASE}/root"


class RefusedError(Exception):
    """The machine cannot isolate a program."""


libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments) -> None:
    """Calls a function of libc and refuses if it fails."""
    if getattr(libc, name)(*arguments) < 0:
        raise RefusedError(f"{name}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mounts, as the system call does."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def make_read_only(path: str) -> None:
    """Makes a mount and all below it read-only, without devices and set-user-id programs."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    call("syscall", ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, path.encode(), AT_RECURSIVE,
         ctypes.byref(attributes), ctypes.c_size_t(32))  # fmt: skip


def make_namespaces() -> None:
    """Leaves the machine's mounts, network, processes and inter-process communication."""
    flags = os.CLONE_NEWNS | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:
            os.unshare(flags)
            return
        os.unshare(flags | os.CLONE_NEWUSER)
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as sink:
                sink.write(text)
    except OSError as error:
        raise RefusedError(f"namespaces: {error.strerror}") from None
    finally:
        # Shared memory of the old kind is counted nowhere else. Older kernels let root alone set this.
        with contextlib.suppress(OSError), open("/proc/sys/kernel/shmmax", "w") as sink:
            sink.write("0")


def make_root(disk: int) -> None:
    """Puts together a root of the interpreter's own folders, read-only, and an empty folder."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    sources, links = [], {}
    for path in ("/usr", "/lib", "/lib64", os.path.realpath(sys.base_prefix)):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path) and not any(path.startswith(f"{other}/") or path == other for other in sources):
            sources.append(path)
    # Held open, because the new root may hide them.
    held = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in sources}
    mount("cage", BASE, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=256,mode=755")
    for path, fd in held.items():
        os.makedirs(ROOT + path)
        mount(f"/proc/self/fd/{fd}", ROOT + path, None, MS_BIND | MS_REC)
        os.close(fd)
    for path, to in links.items():
        os.symlink(to, ROOT + path)
    os.makedirs(f"{ROOT}/work")
    make_read_only(BASE)
    mount("work", f"{ROOT}/work", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={disk},nr_inodes=1024,mode=777")
    # Pivoting leaves the old root for good, even for root. The kernel makes no user namespace, and so no new
    # capabilities, for a process whose root is not that of its mounts: therefore a folder below.
    os.chdir(BASE)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chroot("/root")
    os.chdir("/work")


def drop_rights() -> None:
    """Becomes a user who owns nothing, without capabilities, who cannot win any back."""
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if os.geteuid() == 0:
        # A user of its own, so that the limit on processes counts its processes alone.
        user = 1_000_000_000 + int.from_bytes(os.urandom(4)) % 1_000_000_000
        os.setgroups([])
        try:
            os.setresgid(user, user, user)
        except OSError:  # A container that knows the usual users alone.
            user = NOBODY
            os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(limits: dict) -> None:
    """Sets the resource limits."""
    seconds = max(1, int(limits["seconds"] + 1))
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, min(limits["disk"], MAX_FILE)),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def run(program: str, answer: int, token: bytes) -> None:
    """Runs the program and says how it ended; only who reaches its end knows the token."""
    scope = {"__name__": "__main__"}
    process = os.getpid()
    try:
        exec(compile(program, "program", "exec"), scope)
        said = token
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:200]
    if os.getpid() == process:  # What the program forked comes by here too.
        os.write(answer, said)


def guard(request: dict) -> dict:
    """Runs the program of a request under its limits, and says how it ended."""
    limits, token = request["limits"], os.urandom(16)
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDWR)
    make_namespaces()
    make_root(limits["disk"])
    reader, writer = os.pipe()
    refusal_reader, refusal_writer = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.close(reader)
            os.close(refusal_reader)
            limit(limits)
            drop_rights()
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        except BaseException as error:
            os.write(refusal_writer, f"{type(error).__name__}: {error}".encode()[:500])
            os._exit(1)
        os.close(refusal_writer)
        # The first process of a namespace ignores signals that it does not handle; the program runs in its child.
        try:
            second = os.fork()
        except OSError:
            os._exit(1)
        if second == 0:
            run(request["program"], writer, token)
            os._exit(0)
        os.close(writer)
        while True:
            pid, status = os.wait()
            if pid == second:
                # Its end is everybody's.
                os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
    os.close(writer)
    os.close(refusal_writer)
    refusal = os.read(refusal_reader, 500)
    if refusal:
        os.waitpid(first, 0)
        raise RefusedError(refusal.decode())
    try:
        said, is_late = listen(reader, time.monotonic() + limits["seconds"])
    finally:
        os.kill(first, signal.SIGKILL)
        _, status = os.waitpid(first, 0)
    if said == token:
        return {"passed": True, "reason": "passed"}
    if said:
        return {"passed": False, "reason": said.decode("utf-8", "replace")[:200]}
    if is_late:
        return {"passed": False, "reason": "timed out"}
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    reason = f"killed by {signal.Signals(code).name}" if code in set(signal.Signals) else "ended without an answer"
    return {"passed": False, "reason": reason}


def listen(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Reads the answer, and whether the time was up before it came."""
    said = b""
    while len(said) < MAX_ANSWER:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return said, True
        chunk = os.read(reader, MAX_ANSWER)
        if not chunk:
            break
        said += chunk
    return said, False


def main() -> None:
    """Reads a request from standard input and writes the answer to standard output."""
    request = json.loads(sys.stdin.buffer.read())
    try:
        answer = guard(request)
    except RefusedError as error:
        answer = {"refused": str(error)}
    except (OSError, AttributeError) as error:
        answer = {"refused": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
