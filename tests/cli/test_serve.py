"""``bass-jax serve`` as a process: it answers, stops on a signal, and starts again after it was killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from tests.snippets import ROOT, tiny_pair

SMALL = "--slots", "1", "--capacity", "64"


@contextlib.contextmanager
def serving(*options: str, env: dict[str, str] | None = None):
    """Yields the process and its address."""
    command = [sys.executable, "-m", "bass_jax", "serve", str(tiny_pair()), "--name", "tiny", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "http://127.0.0.1:" in line)
            yield process, line.split()[3].removesuffix("/v1;")
        finally:
            process.kill()


def complete(url: str, key: str = "", **fields) -> dict:
    body = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 20, "temperature": 0} | fields).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.slow
def test_the_server_stops_on_a_signal_and_survives_a_kill(tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("secret\n")
    errors = []

    def load(url):
        try:
            while True:
                complete(url, "secret", n=64, max_tokens=60)
        except OSError as error:
            errors.append(error)

    with serving("--api-key-file", str(key_file), "--slots", "2", "--capacity", "64") as (process, url):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            complete(url)
        text = complete(url, "secret")["choices"][0]["text"]
        loading = threading.Thread(target=load, args=(url,))
        loading.start()
        complete(url, "secret")  # The server is busy with both.
        process.kill()
        loading.join(timeout=30)
    assert text and len(errors) == 1, "the client sees an error"
    with serving("--slots", "2", "--capacity", "64") as (process, url):
        assert complete(url)["choices"][0]["text"] == text
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_memory_does_not_grow_with_requests():
    """For a minute, after everything was compiled; docs/results.md has a longer run."""
    options = "--minutes", "1", "--words", "20", "--options=--policy 'fixed(draft_len=2)'"
    command = [sys.executable, ROOT / "benchmarks" / "server_memory.py", tiny_pair(), *options]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[-1])
    assert found["counts"]["errors"] == found["left"] == 0 and sum(found["counts"].values()) > 60
    assert found["growth"] < 0.05


@pytest.mark.slow
def test_two_processes_serve_one_model():
    """The second process follows the first, and both end when the first is stopped."""
    with serving(*SMALL) as (_, url):
        text = complete(url)["choices"][0]["text"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    job = "--distributed", "--tp", "2", "--coordinator", coordinator, "--num-processes", "2", "--process"
    command = [
        sys.executable,
        "-m",
        "bass_jax",
        "serve",
        str(tiny_pair()),
        "--slots",
        "1",
        "--capacity",
        "64",
        *job,
        "1",
    ]
    environment = os.environ | {"XLA_FLAGS": ""}  # one device per process
    with subprocess.Popen(command, env=environment) as follower:
        try:
            with serving(*SMALL, *job, "0", env=environment) as (process, url):
                assert complete(url)["choices"][0]["text"] == text
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=60) == 0 and follower.wait(timeout=60) == 0
        finally:
            follower.kill()


def test_an_empty_key_file_is_refused(tmp_path):
    from bass_jax.cli.main import main

    (tmp_path / "key").touch()
    assert main(["serve", str(tiny_pair()), "--api-key-file", str(tmp_path / "key")]) == 2
