"""Calibration and real-time checks on a tiny pair."""

import mmap

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.cli import traffic_checks
from bass_jax.engine import EngineConfig
from bass_jax.experiments.traffic.backends import simulate_traffic
from bass_jax.experiments.traffic.calibration import measure_overhead, measure_serving, with_exhaustive_outputs
from bass_jax.experiments.traffic.drive import RealClock, drive
from bass_jax.experiments.traffic.latency import summarize_traffic
from bass_jax.experiments.traffic.workload import Workload
from tests import tiny
from tests.cost_model.profiles import made_up

CONFIG = EngineConfig(num_slots=3, capacity=64, chunk=16, buckets=(4,))


@pytest.fixture(scope="module")
def engine():
    target = tiny.model(1, num_layers=1)
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.05)))
    return bass.Engine(pair, bass.SpecConfig(4, "greedy"), config=CONFIG)


@pytest.mark.slow
def test_a_simulation_has_the_counts_of_the_engine(engine, tmp_path):
    """The same requests have the same tokens, drafts and acceptance in real and in simulated time.

    Only the composition of the batches depends on the clock.
    """
    random = np.random.default_rng(0)
    prompts = [random.integers(0, tiny.VOCAB, num) for num in (5, 1, 17, 9, 30)]
    limits = np.array([12, 20, 7, 30, 16])
    workload = Workload(np.linspace(0, 0.01, 5), np.array([len(one) for one in prompts]), limits, limits, [])
    known = with_exhaustive_outputs(engine.pair, prompts, workload, str(tmp_path / "exhaustive.jsonl"), batch=3)
    clock, before = RealClock(), engine.counts
    engine.loop.clock = clock

    def submit(index: int):
        return engine.submit(prompts[index], max_new_tokens=int(limits[index]), stop_tokens=())

    handles = drive(engine.loop, clock, workload.times.tolist(), submit)
    costs = measure_serving(engine, made_up())
    simulated = simulate_traffic(known, CONFIG, bass.policies.fixed(4), costs)
    assert [one.num_tokens for one in handles] == [one.num_tokens for one in simulated.handles] == limits.tolist()
    for name in ("num_row_steps", "num_drafted", "num_accepted", "num_emitted", "num_finished", "num_chunks"):
        real = getattr(engine.counts, name) - getattr(before, name)
        assert real == getattr(simulated.counts, name), name
    assert costs.insert > 0 and (costs.chunk > 0).all() and costs.host > 0
    for found in (handles, simulated.handles):
        for one in found:
            times = one.times
            assert times.submitted <= times.admitted <= times.begun < times.first <= times.finished
    summary = summarize_traffic(handles, engine.counts)
    assert summary.num_tokens == limits.sum() and summary.latency.mean > 0


def test_overhead_is_measured_and_the_engine_is_idle_again(engine):
    found = measure_overhead(engine, 3, num_steps=4)
    assert 0 < found.host_seconds < 10 * found.step_seconds
    assert found.share == found.host_seconds / found.step_seconds
    assert engine.loop.is_idle
    with pytest.raises(ValueError, match="num_rows=4"):
        measure_overhead(engine, 4, num_steps=4)


@pytest.mark.slow
def test_rows_that_end_before_the_last_begins_are_refused(engine):
    """One prompt is read between two steps, so the first of 64 rows with 62 tokens ends before the last begins."""
    config = EngineConfig(num_slots=64, capacity=64, buckets=(64,), chunk=8, chunks_per_step=1)
    small = bass.Engine(engine.pair, bass.SpecConfig(4, "greedy"), config=config)
    with pytest.raises(ValueError, match="num_rows=64: expected a capacity"):
        measure_overhead(small, 64, num_steps=4)
    assert small.loop.is_idle


def test_memory_is_measured():
    """The memory is mapped, because an allocator can reuse memory that an earlier test has freed."""
    before = traffic_checks._resident_bytes()
    with mmap.mmap(-1, 2**27) as block:
        for start in range(0, len(block), mmap.PAGESIZE):
            block[start] = 1
        assert traffic_checks._resident_bytes() - before > 2**26
    assert traffic_checks._resident_bytes() - before < 2**26
