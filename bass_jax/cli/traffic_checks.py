"""The checks of ``bass-jax traffic`` in real time: agreement of the simulation, scheduler overhead, and a soak test."""

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from bass_jax.cli.output import Output, cell
from bass_jax.cli.traffic_display import EngineView
from bass_jax.config import SpecConfig, batch_bucket
from bass_jax.engine import Engine, RequestHandle
from bass_jax.experiments.traffic.backends import RealBackend, simulate_traffic, with_batching
from bass_jax.experiments.traffic.calibration import measure_overhead, measure_serving, with_exhaustive_outputs
from bass_jax.experiments.traffic.latency import summarize_traffic
from bass_jax.experiments.traffic.traffic_config import TrafficConfig

MAX_DIFFERENCE = 0.1  # relative, between a simulated and a real mean latency
MAX_OVERHEAD = 0.03  # the scheduler's share of a step
MAX_GROWTH = 0.02  # relative growth of the process's memory in the second half of a soak test


def run_check(
    options: argparse.Namespace, config: TrafficConfig, backend: RealBackend, notes: Console, out: Output
) -> int:
    """Runs the selected check; returns 0 if it holds, else 1."""
    with EngineView(notes, is_shown=notes.is_terminal and not options.quiet) as view:
        if options.agreement:
            return _check_agreement(config, backend, view, out)
        if options.overhead is not None:
            return _check_overhead(config, backend, options.overhead, out)
        return _soak(config, backend, options.soak, view, out)


def _check_agreement(config: TrafficConfig, backend: RealBackend, view: EngineView, out: Output) -> int:
    """Serves the first pattern in real time, and the same requests in simulated time with measured costs."""
    workload = backend.workload(config.traffic[0])
    prompts = backend.prompts(len(workload.times))
    path = Path(config.output_dir) / "exhaustive.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    view.begin("drafting at every position, for the simulation")
    known = with_exhaustive_outputs(backend.pair, prompts, workload, str(path), config.engine.num_slots)
    rows, differences = [], []
    for batching in config.batching:
        for policy in config.policies:
            view.begin(f"{batching}, {policy}")
            costs = measure_serving(backend.engine(batching, policy, time.perf_counter), backend.profile)
            real = backend.serve(workload, batching, policy, view)
            engine = with_batching(config.engine, batching)
            simulated = simulate_traffic(known, engine, backend.policy(policy), costs)
            means = [summarize_traffic(one.handles, one.counts).latency.mean for one in (real, simulated)]
            differences.append(means[1] / means[0] - 1)
            rows.append((batching, policy, *(cell(mean, ".2f", " s") for mean in means), cell(differences[-1], "+.1%")))
    title = f"{config.name}, {config.traffic[0].name}: {len(workload.times)} requests, mean latency"
    out.table(("batching", "policy", "real", "simulated", "difference"), rows, title, num_left=2)
    largest = max(map(abs, differences))
    holds = largest <= MAX_DIFFERENCE
    out.note(f"largest difference {largest:.1%}: {'within' if holds else 'NOT within'} {MAX_DIFFERENCE:.0%}")
    return 0 if holds else 1


def _check_overhead(config: TrafficConfig, backend: RealBackend, num_rows: int, out: Output) -> int:
    """Times steps of a full batch in which no request joins or ends."""
    changes = {"buckets": (batch_bucket(num_rows),), "chunks_per_step": num_rows, "token_budget": None}
    engine_config = dataclasses.replace(config.engine, num_slots=num_rows, **changes)
    found = measure_overhead(Engine(backend.pair, SpecConfig(4, "greedy"), config=engine_config), num_rows, 24)
    holds = found.share < MAX_OVERHEAD
    out.note(
        f"{num_rows} rows, draft length 4: a step takes {1e3 * found.step_seconds:.1f} ms, and the scheduler "
        f"{1e6 * found.host_seconds:.0f} us of it, {found.share:.2%}: {'below' if holds else 'NOT below'} "
        f"{MAX_OVERHEAD:.0%}"
    )
    return 0 if holds else 1


def _soak(config: TrafficConfig, backend: RealBackend, minutes: float, view: EngineView, out: Output) -> int:
    """Keeps the queue full, cancels some requests, and checks slots, and in the second half memory and compilations."""
    compiled: list[str] = []

    def on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    engine = backend.engine("continuous", config.policies[-1], time.perf_counter, view)
    random, prompts = np.random.default_rng(config.seed), backend.prompts(256)
    view.begin(f"{config.name}: soak test of {minutes:g} minutes")
    start, num = time.perf_counter(), 0
    running: list[RequestHandle] = []
    memory: list[int] = []
    shortest, longest = config.requests.new_tokens
    jax.monitoring.register_event_duration_secs_listener(on_event)
    while (elapsed := time.perf_counter() - start) < 60 * minutes:
        running = [handle for handle in running if handle.finish_reason is None]
        while len(running) < 2 * config.engine.num_slots:
            limit = int(random.integers(shortest, longest + 1))
            running.append(engine.submit(prompts[num % len(prompts)], max_new_tokens=limit, seed=num % 2**32))
            num += 1
        if random.random() < 0.01:
            running[random.integers(len(running))].cancel()
        engine.advance()
        if elapsed < 30 * minutes:
            compiled.clear()  # `auto` compiles the lengths that it tries.
        if len(memory) < elapsed:
            memory.append(_resident_bytes())
    engine.run()
    half = memory[len(memory) // 2 :]
    growth = half[-1] / half[0] - 1
    scheduler, counts = engine.loop.scheduler, engine.counts
    is_clean = scheduler.is_idle and scheduler.num_reserved == 0 and counts.num_finished == num
    out.note(
        f"{minutes:g} minutes: {counts.num_finished} of {num} requests ended, {counts.num_emitted} tokens in "
        f"{counts.num_steps} steps, {half[-1] / 2**20:.0f} MiB resident, {'no slot' if is_clean else 'SLOTS'} leaked; "
        f"in the second half {len(compiled)} compilations and {growth:+.2%} of memory"
    )
    return 0 if is_clean and not compiled and growth <= MAX_GROWTH else 1


def _resident_bytes() -> int:
    """Returns the resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise ValueError("/proc/self/status: expected a line VmRSS, as on Linux")
