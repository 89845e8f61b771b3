"""What steps take beside what their bytes and FLOPs allow on this device."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from bass_jax.analysis.profiler import step_seconds, timed_state
from bass_jax.config import SpecConfig
from bass_jax.cost_model import Device, PassShape, RooflineModel, expected_emitted, pass_shape
from bass_jax.decoding.compiled_steps import bucket_spec
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.drafters import EagleDrafter, ModelDrafter
from bass_jax.models.mesh import mesh_of
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS, compile_with_thunks, is_one_graph

MAX_IN_FLIGHT = 8
"""Steps that are dispatched one behind the other where host gaps are measured."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One batch, draft length and context.

    Attributes:
        batch: rows.
        draft_len: drafts per step; 0 is regular decoding.
        context: committed tokens per row when the steps begin.
        seconds: median of a step, its counts read by the host.
        in_flight_seconds: of a step when the host reads nothing between steps.
        tokens: emitted per step in expectation, all rows together.
        num_bytes: that a step must read: weights once per pass, and the rows' caches.
        roofline_seconds: the longer of reading and computing, per stage, on the measured device.
        bandwidth_share: of the measured bandwidth, that reading `num_bytes` in `seconds` takes.
        num_launches: kernels, library calls and copies of a step; None but on a GPU.
        is_one_graph: whether one CUDA graph holds them all; None but on a GPU.
        compile_seconds: of this cell's executables.
        num_compiled: of them.
        planned_bytes: of device memory, as compiled: weights, state and temporaries.
        temporary_bytes: of them, temporaries.
        peak_bytes: of device memory, as measured so far; None where the device does not say.
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
    temporary_bytes: int
    peak_bytes: int | None

    @property
    def host_gap_seconds(self) -> float:
        """What the host adds to a step by reading its counts before it dispatches the next."""
        return max(self.seconds - self.in_flight_seconds, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Of all rows."""
        return self.tokens / self.seconds

    def as_record(self) -> dict:
        """Everything, for JSON."""
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
    """Times steps of a pair, cell by cell.

    What a step takes does not depend on what it accepts: steps of the real rule on arbitrary tokens are timed, and how
    many tokens they would emit is worked out from `rates`.

    Args:
        pair: target and drafter.
        spec: the rule; its draft length does not matter.
        device: with measured peaks; see `bass_jax.cost_model.measure_device`.
        rates: acceptance by position, measured or assumed; positions past the last have its rate.
        batches: buckets of rows.
        draft_lens: buckets; 0 is regular decoding.
        contexts: committed tokens per row.
        sampling: default greedy.
        trace: directory for a trace of some steps of every cell, for a viewer of profiles.

    Raises:
        ValueError: if there is no rate.
    """
    if not rates:
        raise ValueError("rates: expected the acceptance of at least one position")
    sampling = sampling or SamplingParams()
    if spec.acceptance == "token" and sampling.is_greedy:
        spec = dataclasses.replace(spec, acceptance="greedy")
    specs = {draft_len: bucket_spec(spec, draft_len) for draft_len in draft_lens}
    mesh = mesh_of(pair)
    if mesh is not None:  # Its devices read together.
        device = dataclasses.replace(
            device, bandwidth=mesh.size * device.bandwidth, peak_flops=mesh.size * device.peak_flops
        )
    for batch in batches:
        for context in contexts:
            yield from _cells(pair, specs, sampling, device, rates, batch, context, trace)


def _cells(pair, specs, sampling, device, rates, batch, context, trace) -> Iterator[Cell]:
    some = next(iter(specs.values()))
    compiled = {}
    for draft_len, spec in specs.items():
        before = JIT_CACHE.num_compiled, JIT_CACHE.compile_seconds
        state = timed_state(pair, spec, sampling, batch, context)
        executable = JIT_CACHE.get(_step(draft_len), pair, state, spec, donate_argnums=(1,))
        made = JIT_CACHE.num_compiled - before[0], JIT_CACHE.compile_seconds - before[1]
        compiled[draft_len] = (executable, *made)
    seconds = step_seconds(pair, specs, timed_state(pair, some, sampling, batch, context))
    for draft_len, spec in specs.items():
        executable, num_compiled, compile_seconds = compiled[draft_len]
        make = lambda spec=spec: timed_state(pair, spec, sampling, batch, context)  # noqa: E731
        in_flight = _in_flight_seconds(executable, pair, make, spec, draft_len)
        if trace is not None:
            _record(executable, pair, make(), spec, trace / f"batch{batch}_drafts{draft_len}_context{context}")
        num_bytes, roofline = _limits(pair, device, batch, draft_len, context)
        memory = executable.memory_analysis()
        planned = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        planned += memory.output_size_in_bytes - memory.alias_size_in_bytes
        launches = _launches(pair, make, spec, draft_len)
        yield Cell(
            batch=batch, draft_len=draft_len, context=context, seconds=seconds[draft_len], in_flight_seconds=in_flight,
            tokens=batch * float(_emitted(rates, draft_len)), num_bytes=num_bytes, roofline_seconds=roofline,
            bandwidth_share=num_bytes / seconds[draft_len] / device.bandwidth,
            num_launches=None if launches is None else len(launches),
            is_one_graph=None if launches is None else is_one_graph(launches),
            compile_seconds=compile_seconds, num_compiled=num_compiled,
            planned_bytes=planned, temporary_bytes=memory.temp_size_in_bytes,
            peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        )  # fmt: skip


def _step(draft_len: int) -> Callable:
    return speculate_step if draft_len else decode_step


def _emitted(rates: Sequence[float], draft_len: int) -> jax.Array:
    padded = [*rates, *[rates[-1]] * draft_len][: max(draft_len, 1)]
    return expected_emitted(jnp.asarray(padded), jnp.asarray(draft_len))


def _limits(pair: Pair, device: Device, batch: int, draft_len: int, context: int) -> tuple[float, float]:
    """Bytes that a step must read, and the seconds that it takes at least."""
    nothing = PassShape(0.0, 0.0, 0.0, 0.0, 0.0)
    target, draft = pass_shape(pair.target.config), nothing
    if isinstance(pair.drafter, ModelDrafter | EagleDrafter):
        draft = pass_shape(pair.drafter.model.config)
    model = RooflineModel(target, draft, device.peak_flops, device.bandwidth, 0.0, overlap=1.0)
    seconds = model.target_seconds(batch, draft_len + 1, context) + model.draft_seconds(batch, draft_len, context, 0)
    num_bytes = target.weight_bytes + batch * context * target.cache_bytes
    num_bytes += draft_len * (draft.weight_bytes + batch * context * draft.cache_bytes)
    return num_bytes, float(seconds)


def _in_flight_seconds(executable: Callable, pair: Pair, make: Callable, spec: SpecConfig, draft_len: int) -> float:
    """Per step, of steps that follow one another without the host; rows that reach their limit go on being computed."""
    found = []
    for _ in range(4):
        state = make()
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(MAX_IN_FLIGHT):
            state, info = executable(pair, state, spec)
        jax.block_until_ready(info)
        found.append((time.perf_counter() - start) / MAX_IN_FLIGHT)
    return statistics.median(found[1:])


def _record(executable: Callable, pair: Pair, state, spec: SpecConfig, directory: Path) -> None:
    """Writes a trace of four steps."""
    jax.block_until_ready(state)
    with jax.profiler.trace(str(directory)):
        for _ in range(4):
            state, info = executable(pair, state, spec)
        jax.block_until_ready(info)


def _launches(pair: Pair, make: Callable, spec: SpecConfig, draft_len: int):
    """What a step launches, from a compilation of its own that dumps it; None but on a GPU."""
    if jax.devices()[0].platform != "gpu":
        return None
    with contextlib.suppress(ValueError):
        lowered = jax.jit(_step(draft_len), donate_argnums=1).lower(pair, make(), spec)
        return compile_with_thunks(lowered, compiler_options=ONE_GRAPH_OPTIONS)[1]
    return None
