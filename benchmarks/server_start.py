"""Measures how long `bass-jax serve` takes from the start of the process to the first token of an answer.

    python benchmarks/server_start.py

The first process compiles into an empty cache, and the others find everything there. A client waits for the port and
asks at once, as a stream. Seconds are counted from the start of the process; CPU seconds are those of all its threads
at the first token. The last line is JSON.
"""

import argparse
import datetime
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", default="checkpoints/quickstart")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--options", type=shlex.split, default=[], help="of bass-jax serve, as one text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        runs = [start(options.pair, options.options, cache) for _ in range(1 + options.repeats)]
    for title, group in (("empty cache", runs[:1]), ("warm cache", runs[1:])):
        medians = {name: statistics.median(run[name] for run in group) for name in group[0]}
        lowest, highest = (one(run["first_token"] for run in group) for one in (min, max))
        print(
            f"{title}: the port is open after {medians['listening']:.2f} s, the first token is there after "
            f"{medians['first_token']:.2f} s ({lowest:.2f}-{highest:.2f}), {medians['cpu']:.2f} s of CPU"
        )
    print(json.dumps({"date": str(datetime.date.today()), "pair": options.pair, "runs": runs}))


def start(pair: str, options: list[str], cache: str) -> dict[str, float]:
    """Starts a server, asks it for a text, and stops it; returns times in seconds."""
    command = [sys.executable, "-m", "bass_jax", "serve", pair, "--name", "served", "--port", "0", *options]
    body = {"model": "served", "prompt": "def fibonacci(n):", "max_tokens": 8, "temperature": 0, "stream": True}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # An installed package has bytecode.
    environment = os.environ | {"XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[3].removesuffix("/v1;")
        listening = time.perf_counter() - begun
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=600) as response:
            assert response.readline().startswith(b"data: ")
            first_token = time.perf_counter() - begun
            process.kill()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"listening": listening, "first_token": first_token, "cpu": cpu}


if __name__ == "__main__":
    main()
