"""Times the steps of a pair and compares them with the time that their bytes and FLOPs take on this device."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.analysis.profiler import compiled_step, step_specs, time_steps, timed_state
from bass_jax.config import SpecConfig
from bass_jax.cost_model import Device, PassShape, RooflineModel, draft_pass_shape, expected_emitted, pass_shape
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.state import SpecState
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.models import require_model
from bass_jax.models.mesh import mesh_of
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS, compile_with_thunks, is_one_graph

NUM_IN_FLIGHT = 8
"""Steps that are dispatched one after the other to measure a step without the host."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """The measurement of one batch size, draft length and context.

    Attributes:
        batch: number of rows.
        draft_len: drafts per step; 0 is regular decoding.
        context: committed tokens per row when the steps begin.
        seconds: median time of a step, including the transfer of its counts to the host.
        in_flight_seconds: time of a step when the host reads nothing between steps.
        tokens: expected number of emitted tokens per step, of all rows.
        num_bytes: bytes that a step has to read: the weights once per pass, and the caches of the rows.
        roofline_seconds: the longer of read and compute time of each stage, with the measured peaks of the device.
        bandwidth_share: share of the measured bandwidth that reading `num_bytes` in `seconds` takes.
        num_launches: kernels, library calls and copies of a step; None except on a GPU.
        is_one_graph: whether one CUDA graph holds all of them; None except on a GPU.
        compile_seconds: compile time of the cell.
        num_compiled: functions that were compiled for the cell.
        planned_bytes: device memory of the compiled step: weights, state and temporaries.
        peak_bytes: largest device memory in use so far; None if the device does not report it.
    """

    batch: int
    draft_len: int
    context: int
    seconds: float
    in_flight_seconds: float
    tokens: float
    num_bytes: float
    roofline_seconds: float
    bandwidth_share: float
    num_launches: int | None
    is_one_graph: bool | None
    compile_seconds: float
    num_compiled: int
    planned_bytes: int
    peak_bytes: int | None

    @property
    def host_gap_seconds(self) -> float:
        """The time that the host adds to a step by reading its counts before it dispatches the next one."""
        return max(self.seconds - self.in_flight_seconds, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of all rows."""
        return self.tokens / self.seconds

    def as_record(self) -> dict:
        """Returns all fields and properties for JSON."""
        derived = {"host_gap_seconds": self.host_gap_seconds, "tokens_per_second": self.tokens_per_second}
        return dataclasses.asdict(self) | derived


def run_bench(
    pair: Pair,
    spec: SpecConfig,
    device: Device,
    rates: Sequence[float],
    *,
    batches: Sequence[int] = (1, 8),
    draft_lens: Sequence[int] = (0, 4),
    contexts: Sequence[int] = (216,),
    sampling: SamplingParams | None = None,
    trace: Path | None = None,
) -> Iterator[Cell]:
    """Times the steps of a pair and yields one cell after the other.

    The time of a step does not depend on the number of accepted drafts. Steps of the real rule are therefore timed on
    arbitrary tokens, and the number of emitted tokens is computed from `rates`.

    Args:
        pair: target and drafter.
        spec: acceptance rule and other options; its draft length is not used.
        device: with measured peaks; see `bass_jax.cost_model.measure_device`.
        rates: acceptance rate by position, measured or assumed; the last one is used for later positions.
        batches: numbers of rows, which are batch buckets.
        draft_lens: draft-length buckets; 0 is regular decoding.
        contexts: committed tokens per row.
        sampling: default greedy.
        trace: directory for a JAX profiler trace of some steps of every cell.

    Raises:
        ValueError: if there is no rate.
    """
    if not rates:
        raise ValueError("rates: expected the acceptance of at least one position")
    mesh = mesh_of(pair)
    if mesh is not None:  # The devices of a mesh read and compute at the same time.
        device = dataclasses.replace(
            device, bandwidth=mesh.size * device.bandwidth, peak_flops=mesh.size * device.peak_flops
        )
    specs = step_specs(spec, sampling, draft_lens)
    for batch, context in itertools.product(batches, contexts):
        make_state = functools.partial(timed_state, pair, sampling=sampling, batch=batch, context=context)
        compiled = {}
        for draft_len, spec in specs.items():
            before = JIT_CACHE.num_compiled, JIT_CACHE.compile_seconds
            step = compiled_step(pair, make_state(spec=spec), spec, draft_len)
            compiled[draft_len] = step, JIT_CACHE.num_compiled - before[0], JIT_CACHE.compile_seconds - before[1]
        seconds = time_steps(pair, specs, make_state(spec=specs[draft_lens[0]]))
        for draft_len, spec in specs.items():
            step, num_compiled, compile_seconds = compiled[draft_len]
            in_flight = in_flight_seconds(step, pair, functools.partial(make_state, spec=spec), spec)
            if trace is not None:
                with jax.profiler.trace(str(trace / f"batch{batch}_drafts{draft_len}_context{context}")):
                    _run_steps(step, pair, make_state(spec=spec), spec, num_steps=4)
            padded = [*rates, *[rates[-1]] * draft_len][: max(draft_len, 1)]
            num_bytes, roofline_seconds = roofline_of_step(pair, device, batch, draft_len, context)
            memory = step.call.memory_analysis()
            planned = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            planned += memory.output_size_in_bytes - memory.alias_size_in_bytes
            launches = _launches(pair, make_state(spec=spec), spec, draft_len)
            yield Cell(
                batch=batch,
                draft_len=draft_len,
                context=context,
                seconds=seconds[draft_len],
                in_flight_seconds=in_flight,
                tokens=batch * float(expected_emitted(jnp.asarray(padded), jnp.asarray(draft_len))),
                num_bytes=num_bytes,
                roofline_seconds=roofline_seconds,
                bandwidth_share=num_bytes / seconds[draft_len] / device.bandwidth,
                num_launches=None if launches is None else len(launches),
                is_one_graph=None if launches is None else is_one_graph(launches),
                compile_seconds=compile_seconds,
                num_compiled=num_compiled,
                planned_bytes=planned,
                peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            )


def roofline_of_step(pair: Pair, device: Device, batch: int, draft_len: int, context: int) -> tuple[float, float]:
    """Returns the bytes that a step has to read, and its shortest time in seconds."""
    target = pass_shape(require_model(pair.target, "a roofline").config)
    draft = draft_pass_shape(pair.drafter) or PassShape()
    model = RooflineModel(target, draft, device.peak_flops, device.bandwidth, 0.0, overlap=1.0)
    seconds = model.target_seconds(batch, draft_len + 1, context) + model.draft_seconds(batch, draft_len, context, 0)
    num_bytes = target.read_bytes(batch * (draft_len + 1))
    num_bytes += batch * (context * target.cache_bytes + target.state_bytes)
    num_bytes += draft_len * (draft.read_bytes(batch) + batch * context * draft.cache_bytes)
    return num_bytes, float(seconds)


def in_flight_seconds(step: Callable, pair: Pair, make_state: Callable[[], SpecState], spec: SpecConfig) -> float:
    """Returns the time per step without the host, the median of three runs after one that is not counted.

    Rows that reach their limit are still computed.
    """

    def run() -> float:
        state = jax.block_until_ready(make_state())
        start = time.perf_counter()
        _run_steps(step, pair, state, spec, NUM_IN_FLIGHT)
        return (time.perf_counter() - start) / NUM_IN_FLIGHT

    return float(np.median([run() for _ in range(4)][1:]))


def _run_steps(step: Callable, pair: Pair, state: SpecState, spec: SpecConfig, num_steps: int) -> None:
    for _ in range(num_steps):
        state, info = step(pair, state, spec)
    jax.block_until_ready(info)


def _launches(pair: Pair, state: SpecState, spec: SpecConfig, draft_len: int) -> list | None:
    """Compiles the step once more with a dump of its launches and returns them; None except on a GPU."""
    if jax.devices()[0].platform != "gpu":
        return None
    with contextlib.suppress(ValueError):
        lowered = jax.jit(speculate_step if draft_len else decode_step, donate_argnums=1).lower(pair, state, spec)
        return compile_with_thunks(lowered, compiler_options=ONE_GRAPH_OPTIONS)[1]
    return None
