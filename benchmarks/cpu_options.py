"""Compares XLA's compiler options for a CPU on a pass of the target.

    python benchmarks/cpu_options.py --batches 1,8 --widths 1,5

A pass over the quickstart target (all layers and the output projection, float32) is compiled with each set of options.
The sets take turns, so that other work on the machine affects all of them. A wall time below the CPU time means that
several cores worked at the same time. The last line is the table as JSON.
"""

import argparse
import datetime
import json
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import bass_jax as bass
from bass_jax.runtime.cpu_workarounds import CPU_COMPILE_TIME_OPTIONS, CPU_COMPILER_OPTIONS

OPTIONS = {
    "default": {},
    "512-bit vectors": {"xla_cpu_prefer_vector_width": 512},
    "no YNNPACK": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "both": {"xla_cpu_prefer_vector_width": 512, "xla_cpu_experimental_ynn_fusion_type": ""},
    "512-bit, level 1": {"xla_cpu_prefer_vector_width": 512, "xla_backend_optimization_level": 1},
    "as in JitCache": CPU_COMPILER_OPTIONS | CPU_COMPILE_TIME_OPTIONS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--widths", default="1,5", help="tokens per row and pass")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    model = bass.load_pair(options.pair, drafter="ngram").target
    table = Table(title=f"milliseconds per pass, {options.context} tokens of context, medians")
    for column in ("batch", "width", "options", "wall ms", "least wall ms", "CPU ms", "compilation s"):
        table.add_column(column, justify="right")
    cells = []
    for batch in map(int, options.batches.split(",")):
        for width in map(int, options.widths.split(",")):
            cells += measure(model, batch, width, options)
    for cell in cells:
        times = (f"{cell[name]:.2f}" for name in ("wall_ms", "least_wall_ms", "cpu_ms", "compile_seconds"))
        table.add_row(str(cell["batch"]), str(cell["width"]), cell["options"], *times)
    Console(width=110).print(table)
    print(json.dumps({"date": datetime.date.today().isoformat(), "jax": jax.__version__, "cells": cells}))


def measure(model, batch, width, options) -> list[dict]:
    """Returns the medians of each set of options."""
    tokens = jnp.zeros((batch, width), jnp.int32)
    positions = jnp.broadcast_to(options.context + jnp.arange(width, dtype=jnp.int32), (batch, width))
    cache = model.init_cache(batch, 256)
    lowered = jax.jit(bass.models.Model.forward, donate_argnums=3).lower(model, tokens, positions, cache)
    passes, compile_seconds = {}, {}
    for name, chosen in OPTIONS.items():
        start = time.perf_counter()
        passes[name] = lowered.compile(compiler_options=chosen)
        compile_seconds[name] = time.perf_counter() - start
    walls, cpus = ({name: [] for name in passes} for _ in range(2))
    for round_ in range(-2, options.rounds):  # two rounds of warm-up
        for name, run in passes.items():
            start, used = time.perf_counter(), time.process_time()
            cache = jax.block_until_ready(run(model, tokens, positions, cache)).cache
            if round_ >= 0:
                walls[name].append(1e3 * (time.perf_counter() - start))
                cpus[name].append(1e3 * (time.process_time() - used))
    return [
        {
            "batch": batch,
            "width": width,
            "options": name,
            "wall_ms": round(statistics.median(walls[name]), 2),
            "least_wall_ms": round(min(walls[name]), 2),
            "cpu_ms": round(statistics.median(cpus[name]), 2),
            "compile_seconds": round(compile_seconds[name], 2),
        }
        for name in passes
    ]


if __name__ == "__main__":
    main()
