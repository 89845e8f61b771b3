"""Runs a program in two processes that `jax.distributed` connects over the loopback interface."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

START = """
import json, sys
import jax
import numpy as np
import bass_jax as bass
mesh = bass.models.start_distributed(sys.argv[1], 2, int(sys.argv[2]))
"""


def run_in_two_processes(program: str) -> list[Any]:
    """Runs `program` after `START` in two processes with one device each; returns what each prints last, as JSON."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + program, coordinator, str(index)],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]
