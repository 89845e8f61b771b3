"""Asks a server for texts of varied lengths, leaves some answers early, and records the server's memory.

    python benchmarks/server_memory.py --minutes 10

The clients ask without a pause, or with `--pause` on average so many seconds after an answer: completions with prompts
of up to 200 words, limits of 1 to 100 tokens and up to three samples, as streams and whole, with different sampling
parameters. A fifth of the streams are left after their first event, which cancels the request. With llguidance, some
have to match a regular expression. The resident memory of the server's process is read every second. The exit status is
1 if it has grown by more than 2 % over the second half of the time, if an answer is an error, or if the server still
has requests at the end. The last line is JSON.
"""

import argparse
import datetime
import importlib.util
import json
import random
import shlex
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "once", "upon", "time", "there", "was", "one", "of", "them", "3")
MAX_GROWTH = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="?", default="checkpoints/quickstart")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0, help="seconds between the requests of a client, in the mean")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--words", type=int, default=200, help="in the longest prompt")
    parser.add_argument("--warm-up", type=int, default=60, help="answers before the time begins, which compile")
    parser.add_argument("--options", type=shlex.split, default=[], help="of bass-jax serve, as one text")
    options = parser.parse_args()
    command = [sys.executable, "-m", "bass_jax", "serve", options.pair, "--name", "served", "--port", "0"]
    command += ["--slots", str(options.slots), "--capacity", "512", "--page-size", "64", *options.options]
    counts, memory = {"whole": 0, "streams": 0, "cancelled": 0, "errors": 0}, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[3].removesuffix("/v1;")
            is_over = threading.Event()
            clients = [
                threading.Thread(target=ask, args=(url, seed, options, is_over, counts), daemon=True)
                for seed in range(options.clients)
            ]
            for client in clients:
                client.start()
            while sum(counts.values()) < options.warm_up:
                time.sleep(1)
            start = time.monotonic()
            while time.monotonic() < start + 60 * options.minutes:
                memory.append(resident_bytes(server.pid))
                time.sleep(1)
            is_over.set()
            for client in clients:
                client.join(timeout=600)
            left = wait_until_idle(url)
        finally:
            server.kill()
    size = len(memory) // 10
    tenths = [statistics.median(memory[i * size : (i + 1) * size]) for i in range(10)]
    growth = tenths[-1] / tenths[5] - 1
    last = memory[len(memory) // 3 :]
    slope = 3600 * statistics.linear_regression(range(len(last)), last).slope  # bytes per hour
    print(f"{options.minutes:g} minutes: {counts}, {left:g} requests left at the end")
    print("resident MiB, medians of tenths of the time: " + " ".join(f"{x / 2**20:.0f}" for x in tenths))
    is_flat = growth <= MAX_GROWTH
    print(f"slope of the last two thirds: {slope / 2**20:+.1f} MiB per hour")
    print(f"{growth:+.2%} over the second half: {'within' if is_flat else 'NOT within'} {MAX_GROWTH:.0%}")
    found = {"counts": counts, "left": left, "growth": growth, "slope": slope, "bytes": tenths}
    print(json.dumps({"date": str(datetime.date.today()), **found}))
    return 0 if is_flat and not counts["errors"] and left == 0 else 1


def ask(url: str, seed: int, options: argparse.Namespace, is_over: threading.Event, counts: dict[str, int]) -> None:
    """Asks until the time is over."""
    choose = random.Random(seed)
    while not is_over.wait(options.pause * choose.expovariate(1)):
        body = {
            "model": "served",
            "prompt": " ".join(choose.choices(WORDS, k=choose.randint(1, options.words))),
            "max_tokens": choose.randint(1, 100),
            "temperature": choose.choice((0.0, 0.7, 1.0)),
            "frequency_penalty": choose.choice((0.0, 0.5)),
            "n": choose.randint(1, 3),
            "stream": choose.random() < 0.5,
        }
        if importlib.util.find_spec("llguidance") and choose.random() < 0.1:
            body["response_format"] = {"type": "regex", "regex": f"[a-z ]{{1,{choose.randint(5, 50)}}}"}
        try:
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=600) as response:
                if not body["stream"]:
                    json.load(response)
                    counts["whole"] += 1
                elif choose.random() < 0.2:
                    response.readline()
                    counts["cancelled"] += 1
                else:
                    assert response.read().endswith(b"data: [DONE]\n\n")
                    counts["streams"] += 1
        except (OSError, AssertionError) as error:
            detail = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
            print(f"{error!r} {detail}", file=sys.stderr)
            counts["errors"] += 1
            time.sleep(1)


def wait_until_idle(url: str) -> float:
    """Waits up to a minute until the server has no request; returns the number that it has."""
    for _ in range(60):
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
        left = sum(float(lines[f"bass_jax_{name}_requests"]) for name in ("running", "waiting"))
        if left == 0:
            break
        time.sleep(1)
    return left


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


if __name__ == "__main__":
    sys.exit(main())
