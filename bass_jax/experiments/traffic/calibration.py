"""Measures the costs of serving on this device, with the engine's own compiled functions."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.analysis.profiler import measure_profile
from bass_jax.analysis.replay import make_replay
from bass_jax.config import SpecConfig
from bass_jax.cost_model import Profile
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.traces import TraceWriter, read_trace
from bass_jax.engine import Engine, EngineConfig, Request, RequestHandle
from bass_jax.engine.device_executor import DeviceExecutor
from bass_jax.engine.generate import generate
from bass_jax.experiments.traffic.serving_costs import NUM_CONTEXTS, ServingCosts, size_changes
from bass_jax.experiments.traffic.workload import Workload

DRAFT_LENS = (0, 1, 2, 4)
"""Draft lengths that are timed; the times of others are interpolated."""

_NUM_REPEATS = 7


def measure_step_costs(
    pair: Pair, prompts: Sequence[np.ndarray], config: EngineConfig, on_note: Callable[[str], None]
) -> Profile:
    """Profiles steps in the engine's batch sizes and capacity, where attention has the engine's costs."""
    return measure_profile(
        pair,
        prompts[:16],
        SpecConfig(DRAFT_LENS[-1], "greedy"),
        batches=config.sizes,
        draft_lens=DRAFT_LENS,
        contexts=(config.capacity * 5 // 8,),
        on_cell=lambda cell: on_note(f"profiling: {cell}"),
    )


def measure_serving(engine: Engine, profile: Profile) -> ServingCosts:
    """Times prefill chunks, moves and the policy's update in an idle engine, and adds them to a profile."""
    executor, config = engine.executor, engine.config
    handle = RequestHandle(Request(np.ones(config.chunk + 1, np.int32), 1))

    def read_chunk() -> None:
        executor.read(handle, 0, config.chunk)

    def timed(operation: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> float:
        seconds = []
        for _ in range(_NUM_REPEATS):
            prepare()
            executor.wait()
            start = time.perf_counter()
            operation()
            executor.wait()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    chunk = timed(read_chunk)
    insert = timed(lambda: executor.insert(handle, 0), read_chunk)
    executor.stop(0)
    moves = {
        (old, new): timed(lambda new=new: executor.regroup([-1] * new), lambda old=old: _resize(executor, old))
        for old, new in size_changes(config.sizes)
    }
    _resize(executor, config.sizes[0])
    return ServingCosts(profile.table, np.full(NUM_CONTEXTS, chunk), insert, moves, timed(executor.replan))


def _resize(executor: DeviceExecutor, size: int) -> None:
    """Changes an idle batch to `size`, by one size at a time."""
    sizes = executor.sizes
    here, there = sizes.index(len(executor.state.lengths)), sizes.index(size)
    while here != there:
        here += 1 if there > here else -1
        executor.regroup([-1] * sizes[here])


def with_exhaustive_outputs(
    pair: Pair, prompts: Sequence[np.ndarray], workload: Workload, path: str, batch: int
) -> Workload:
    """Decodes every request with drafts at every position, `batch` requests at a time, into a trace at `path`.

    Returns:
        The workload with the lengths of the outputs and the acceptance.
    """
    with TraceWriter(path) as trace:
        for start in range(trace.num_complete * batch, len(prompts), batch):
            rows = slice(start, start + batch)
            limits = workload.limits[rows].tolist()
            spec = SpecConfig(DRAFT_LENS[-1], "greedy")
            generate(pair, prompts[rows], spec, step="exhaustive", trace=trace, max_new_tokens=limits)
    replay = make_replay(read_trace(path))
    acceptable = [replay.acceptable[row, :num] for row, num in enumerate(replay.num_tokens)]
    return workload._replace(new_tokens=replay.num_tokens, acceptable=acceptable)


class Overhead(NamedTuple):
    """The time of the host between two steps."""

    step_seconds: float  # median time of a step, from one result to the next
    host_seconds: float  # mean time of scheduling per step

    @property
    def share(self) -> float:
        """The host's share of a step."""
        return self.host_seconds / self.step_seconds


def measure_overhead(engine: Engine, num_rows: int, num_steps: int) -> Overhead:
    """Fills `num_rows` slots of an idle engine, and times steps in which no request joins or ends.

    Raises:
        ValueError: if the rows cannot run that long.
    """
    room = engine.config.capacity - 2
    if num_steps + 8 > room or num_rows > engine.config.num_slots:
        raise ValueError(
            f"num_rows={num_rows}, num_steps={num_steps}: expected at most {engine.config.num_slots} and {room - 8}"
        )
    handles = [engine.submit([1, 2], max_new_tokens=room, stop_tokens=(), seed=row) for row in range(num_rows)]
    seconds: list[float] = []
    try:
        while engine.loop.scheduler.num_running < num_rows:
            if any(handle.finish_reason is not None for handle in handles):
                raise ValueError(f"num_rows={num_rows}: expected a capacity that the first fills after the last begins")
            engine.advance()
        engine.advance()
        host = engine.loop.host_seconds
        while len(seconds) < num_steps and engine.loop.scheduler.num_running == num_rows:
            start = time.perf_counter()
            engine.advance()
            seconds.append(time.perf_counter() - start)
        spent = engine.loop.host_seconds - host
    finally:
        for handle in handles:
            handle.cancel()
        engine.run()
    if not seconds:
        raise ValueError(f"num_rows={num_rows}: expected rows that run for a step")
    return Overhead(statistics.median(seconds), spent / len(seconds))
