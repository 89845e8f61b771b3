"""Times whole steps of a pair with random weights on a GPU, in about three minutes.

    JAX_PLATFORMS= python -m benchmarks.gpu_steps --output gpu_steps.json

All steps are compiled in threads first. `bass-jax bench` compiles one after the other and runs the prefill; here the
caches hold random values. A step is timed alone, until its report is on the host, and in flight, with the next steps
dispatched before it has ended. The number of accepted drafts has no influence on the time of a step.
"""

import argparse
import functools
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp

import bass_jax as bass
from bass_jax.analysis.profiler import compiled_step, step_specs, time_steps
from bass_jax.analysis.roofline_benchmark import in_flight_seconds, roofline_of_step
from bass_jax.cost_model import measure_device
from bass_jax.decoding.load_pair import random_pair
from bass_jax.decoding.state import SpecState
from tests.abstract import abstract_state


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
            # Different tokens, because equal ones choose the same experts.
            tokens=jax.random.randint(jax.random.key(2), state.tokens.shape, 0, pair.target.config.vocab_size),
            sampling_arrays=jax.tree.map(jnp.zeros_like, shapes.sampling_arrays),
            lengths=lengths,
            prompt_lengths=lengths,
            limits=2 * lengths,
            draft_lens=jnp.full(batch, draft_len, jnp.int32),
            stop_tokens=jnp.full_like(shapes.stop_tokens, -1),
            drafter_state=pair.drafter.commit(state.drafter_state, lengths),
        )

    return jax.jit(build)()


def main(argv: list[str] | None = None) -> None:
    """Compiles, times, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__)
    parser.add_argument("--target", default="bass-7.8b", help="preset of the target")
    parser.add_argument("--draft", default="bass-draft-a-310m", help="preset of the draft model, or a drafter's name")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--draft-lens", default="0,4")
    parser.add_argument("--context", default=512, type=int, help="committed tokens per row")
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args(argv)
    batches, draft_lens = ([int(n) for n in text.split(",")] for text in (arguments.batches, arguments.draft_lens))

    device = measure_device("bfloat16")  # First, because a large model leaves no memory for it.
    print(f"{device.name}: {device.bandwidth / 1e12:.2f} TB/s, {device.peak_flops / 1e12:.0f} TFLOP/s", flush=True)
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
    records = []
    for (batch, draft_len), step in steps.items():
        spec, make_state = specs[draft_len], functools.partial(timed_state, pair, batch, arguments.context, draft_len)
        in_flight = in_flight_seconds(step, pair, make_state, spec)
        alone = time_steps(pair, {draft_len: spec}, make_state())[draft_len]
        _, roofline = roofline_of_step(pair, device, batch, draft_len, arguments.context)
        record = {
            "batch": batch,
            "draft_len": draft_len,
            "alone_ms": 1e3 * alone,
            "in_flight_ms": 1e3 * in_flight,
            "roofline_ms": 1e3 * roofline,
            "temporaries_gb": step.call.memory_analysis().temp_size_in_bytes / 1e9,
        }
        records.append(record)
        print({name: round(value, 3) for name, value in record.items()}, flush=True)
    if arguments.output is not None:
        about = {"device": device.name, "jax": jax.__version__, "target": arguments.target, "draft": arguments.draft}
        arguments.output.write_text(json.dumps({**about, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
