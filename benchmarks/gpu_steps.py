"""Times whole steps of a pair with random weights on a GPU, in about three minutes.

    JAX_PLATFORMS= python -m benchmarks.gpu_steps --output gpu_steps.json

All steps are compiled in threads first. `bass-jax bench` compiles one after the other and runs the prefill; here the
caches hold random values. A step is timed alone, until its report is on the host, and in flight, with the next steps
dispatched before it has ended. The number of accepted drafts has no influence on the time of a step.
"""

import argparse
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bass_jax as bass
from bass_jax.analysis.profiler import compiled_step, step_specs
from bass_jax.cost_model import RooflineModel, draft_pass_shape, measure_device, pass_shape
from bass_jax.decoding.load_pair import random_pair
from bass_jax.decoding.state import SpecState
from bass_jax.models import require_model
from tests.abstract import abstract_state

NUM_TURNS, NUM_STEPS = 5, 10


def timed_state(pair: bass.Pair, batch: int, context: int, draft_len: int) -> SpecState:
    """Returns a state of rows of `context` arbitrary tokens, with room for as many."""
    shapes = abstract_state(pair, batch, 2 * context)

    def fill(shape):
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.vmap(jax.random.key)(jnp.arange(batch, dtype=jnp.uint32))
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return jax.random.normal(jax.random.key(1), shape.shape, shape.dtype)
        return jnp.zeros(shape.shape, shape.dtype)

    def build():
        state, lengths = jax.tree.map(fill, shapes), jnp.full(batch, context, jnp.int32)
        return state._replace(
            sampling_arrays=jax.tree.map(jnp.zeros_like, shapes.sampling_arrays),
            lengths=lengths,
            prompt_lengths=lengths,
            limits=2 * lengths,
            draft_lens=jnp.full(batch, draft_len, jnp.int32),
            stop_tokens=jnp.full_like(shapes.stop_tokens, -1),
            drafter_state=pair.drafter.commit(state.drafter_state, lengths),
        )

    return jax.jit(build)()


def time_step(step, pair: bass.Pair, spec: bass.SpecConfig, state: SpecState) -> tuple[list[float], list[float]]:
    """Returns times of single steps and times per step in flight, in seconds."""
    alone, in_flight = [], []
    for turn in range(NUM_TURNS + 1):
        for _ in range(NUM_STEPS):
            start = time.perf_counter()
            state, info = step(pair, state, spec)
            jax.device_get(info)
            alone.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            state, info = step(pair, state, spec)
        jax.block_until_ready(info)
        in_flight.append((time.perf_counter() - start) / NUM_STEPS)
        if turn == 0:  # XLA records its graphs.
            alone, in_flight = [], []
    return alone, in_flight


def main(argv: list[str] | None = None) -> None:
    """Compiles, times, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__)
    parser.add_argument("--target", default="bass-7.8b", help="preset of the target")
    parser.add_argument("--draft", default="bass-draft-a-310m", help="preset of the draft model")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--draft-lens", default="0,4")
    parser.add_argument("--context", default=512, type=int, help="committed tokens per row")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args(argv)
    batches, draft_lens = ([int(n) for n in text.split(",")] for text in (arguments.batches, arguments.draft_lens))

    pair = random_pair(arguments.target, arguments.draft)
    specs = step_specs(bass.SpecConfig(max(draft_lens)), None, draft_lens)
    cells = [*itertools.product(batches, draft_lens)]

    def compile_cell(cell):
        start, (batch, draft_len) = time.perf_counter(), cell
        shapes = jax.eval_shape(lambda: timed_state(pair, batch, arguments.context, draft_len))
        step = compiled_step(pair, shapes, specs[draft_len], draft_len)
        print(f"compiled batch {batch}, {draft_len} drafts in {time.perf_counter() - start:.0f} s", flush=True)
        return step

    with ThreadPoolExecutor(len(cells)) as threads:
        steps = dict(zip(cells, threads.map(compile_cell, cells), strict=True))
    device = measure_device("bfloat16")
    print(f"{device.name}: {device.bandwidth / 1e12:.2f} TB/s, {device.peak_flops / 1e12:.0f} TFLOP/s", flush=True)
    model = RooflineModel(
        pass_shape(require_model(pair.target, "a roofline").config),
        draft_pass_shape(pair.drafter),
        device.peak_flops,
        device.bandwidth,
        0.0,
        overlap=1.0,
    )
    records = []
    for (batch, draft_len), step in steps.items():
        state = timed_state(pair, batch, arguments.context, draft_len)
        alone, in_flight = time_step(step, pair, specs[draft_len], state)
        roofline = model.target_seconds(batch, draft_len + 1, arguments.context)
        roofline += model.draft_seconds(batch, draft_len, arguments.context, 0)
        record = {
            "batch": batch,
            "draft_len": draft_len,
            "alone_ms": 1e3 * float(np.median(alone)),
            "in_flight_ms": 1e3 * float(np.median(in_flight)),
            "roofline_ms": 1e3 * float(roofline),
            "temporaries_gb": step.call.memory_analysis().temp_size_in_bytes / 1e9,
        }
        records.append(record)
        print({name: round(value, 3) for name, value in record.items()}, flush=True)
    if arguments.output is not None:
        about = {"device": device.name, "jax": jax.__version__, "target": arguments.target, "draft": arguments.draft}
        arguments.output.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
