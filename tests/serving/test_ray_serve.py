"""The example of several engines behind Ray Serve answers as one engine does."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import bass_jax as bass
from tests.snippets import tiny_pair

ROOT = Path(__file__).parents[2]


def ask(url: str, prompt: str) -> str:
    fields = {"model": tiny_pair().name, "prompt": prompt, "max_tokens": 20, "temperature": 0}
    with urllib.request.urlopen(f"{url}/v1/completions", json.dumps(fields).encode(), timeout=120) as response:
        return json.load(response)["choices"][0]["text"]


def metrics(url: str) -> str:
    """Returns the figures of one of the replicas."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        return response.read().decode()


@pytest.mark.slow
def test_two_replicas_answer_as_one_engine():
    pytest.importorskip("ray.serve", reason="needs ray[serve], the extra 'ray'")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, ROOT / "examples" / "ray_serve.py", tiny_pair(), "--cpus", "0.5", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    pair, url = bass.load_pair(tiny_pair()), f"http://127.0.0.1:{port}"
    prompts = ["the", "once upon", "a b c", "x"]
    expected = bass.generate(pair, prompts, raw=True, max_new_tokens=20, step="decode").texts
    with subprocess.Popen(
        [*command, "--slots", "2", "--capacity", "64"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("2 replicas"))
            assert [ask(url, prompt) for prompt in prompts for _ in range(4)] == [x for x in expected for _ in range(4)]
            pages = {metrics(url) for _ in range(30)}
            assert len(pages) == 2 and all("bass_jax_tokens_total 0.0" not in page for page in pages), (
                "both have answered"
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
