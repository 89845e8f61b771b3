"""The checks of ``bass-jax traffic`` in real time: simulation against reality, the scheduler's share, a soak."""

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bass_jax.cli.traffic_display import EngineView
from bass_jax.config import SpecConfig, batch_bucket
from bass_jax.engine import Engine
from bass_jax.experiments.traffic.backends import RealWorld, batched, simulate_traffic
from bass_jax.experiments.traffic.calibration import exhaustive_texts, measure_overhead, measure_serving
from bass_jax.experiments.traffic.latency import summarize_traffic
from bass_jax.experiments.traffic.traffic_config import ExperimentConfig

AGREEMENT = 0.1
"""By how much a simulated mean latency may differ from the real one."""

GROWTH = 0.02
"""By how much a process may grow in the second half of a soak."""


def run(options: argparse.Namespace, config: ExperimentConfig, world: RealWorld, notes: Console, out: Console) -> int:
    """Runs the check that is asked for; returns 0 if it holds, else 1."""
    with EngineView(notes, is_shown=notes.is_terminal and not options.quiet) as view:
        if options.agreement:
            return _agreement(config, world, view, out)
        if options.overhead is not None:
            return _overhead(config, world, options.overhead, out)
        return _soak(config, world, options.soak, view, out)


def _agreement(config: ExperimentConfig, world: RealWorld, view: EngineView, out: Console) -> int:
    """Serves the first pattern in real time, and the same requests in simulated time from measured costs."""
    workload = world.workload(config.traffic[0])
    prompts = world.prompts(len(workload.times))
    path = Path(config.output_dir) / "survey.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    view.begin("drafting at every position, for the simulation")
    texts = exhaustive_texts(world.pair, prompts, workload, str(path), config.engine.num_slots)
    table = Table(title=f"{config.name}, {config.traffic[0].name}: {len(workload.times)} requests, mean latency")
    for name in ("batching", "policy", "real", "simulated", "difference"):
        table.add_column(name, justify="left" if name in ("batching", "policy") else "right")
    differences = []
    for batching in config.batching:
        for policy in config.policies:
            view.begin(f"{batching}, {policy}")
            costs = measure_serving(world.engine(batching, policy, time.perf_counter), world.profile)
            real = world.serve(workload, batching, policy, view)
            simulated = simulate_traffic(texts, batched(config.engine, batching), world.policy(policy), costs)
            means = [summarize_traffic(one.handles, one.counts).latency.mean for one in (real, simulated)]
            differences.append(means[1] / means[0] - 1)
            table.add_row(batching, policy, *(f"{mean:.2f} s" for mean in means), f"{differences[-1]:+.1%}")
    out.print(table)
    worst = max(map(abs, differences))
    holds = worst <= AGREEMENT
    out.print(f"largest difference {worst:.1%}: {'within' if holds else 'NOT within'} {AGREEMENT:.0%}")
    return 0 if holds else 1


def _overhead(config: ExperimentConfig, world: RealWorld, num_rows: int, out: Console) -> int:
    """Steps of a full batch in which nobody comes and nobody goes."""
    engine_config = dataclasses.replace(
        config.engine,
        num_slots=num_rows,
        buckets=(batch_bucket(num_rows),),
        chunks_per_step=num_rows,
        token_budget=None,
    )
    engine = Engine(world.pair, SpecConfig(4, "greedy"), config=engine_config)
    found = measure_overhead(engine, num_rows, num_steps=24)
    holds = found.share < 0.03
    out.print(
        f"{num_rows} rows, draft length 4: a step takes {1e3 * found.step_seconds:.1f} ms, of which the scheduler "
        f"{1e6 * found.host_seconds:.0f} us, {found.share:.2%}: {'below' if holds else 'NOT below'} 3%"
    )
    return 0 if holds else 1


def _soak(config: ExperimentConfig, world: RealWorld, minutes: float, view: EngineView, out: Console) -> int:
    """Keeps a queue full for so long, some requests cancelled; watches memory, compilations and slots."""
    compiled: list[str] = []

    def hear(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    engine = world.engine("continuous", config.policies[-1], time.perf_counter, view)
    random, prompts = np.random.default_rng(config.seed), world.prompts(256)
    view.begin(f"{config.name}: soak of {minutes:g} minutes")
    start, num, waiting, samples = time.perf_counter(), 0, [], []
    limits = config.requests.new_tokens
    jax.monitoring.register_event_duration_secs_listener(hear)
    while (elapsed := time.perf_counter() - start) < 60 * minutes:
        waiting = [handle for handle in waiting if handle.finish_reason is None]
        while len(waiting) < 2 * config.engine.num_slots:
            limit = int(random.integers(limits[0], limits[1] + 1))
            waiting.append(engine.submit(prompts[num % len(prompts)], max_new_tokens=limit, seed=num % 2**32))
            num += 1
        if random.random() < 0.01:
            waiting[random.integers(len(waiting))].cancel()
        engine.advance()
        if len(samples) < elapsed:
            samples.append(_resident_bytes())
    engine.run()
    half = samples[len(samples) // 2 :]
    growth = half[-1] / half[0] - 1
    scheduler, counts = engine.loop.scheduler, engine.counts
    is_clean = scheduler.is_idle and scheduler.num_reserved == 0 and counts.num_finished == num
    out.print(
        f"{minutes:g} minutes: {counts.num_finished} of {num} requests ended, {counts.num_emitted} tokens in "
        f"{counts.num_steps} steps, {len(compiled)} compilations, {half[-1] / 2**20:.0f} MiB resident, "
        f"{growth:+.2%} over the second half, {'no slot' if is_clean else 'SLOTS'} leaked"
    )
    return 0 if is_clean and not compiled and growth <= GROWTH else 1


def _resident_bytes() -> int:
    """Memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise ValueError("/proc/self/status: expected a line VmRSS, as on Linux")
