"""Measures the step times and the acceptance rates of a pair on the current device."""

import datetime
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.config import SpecConfig, capacity_bucket
from bass_jax.cost_model import Profile, TableModel, draft_pass_shape, pass_shape
from bass_jax.decoding.compiled_steps import CompiledSteps, bucket_spec
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.state import SpecState
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.drafters import DraftContext, Proposal, borrows_cache
from bass_jax.drafters.autoregressive import CATCH_UP_CHUNK
from bass_jax.engine.generate import Prompts, generate
from bass_jax.models import require_model
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import LogitsProcessors, SamplingParams
from bass_jax.sampling.keys import step_draft_keys
from bass_jax.typing import Array, Key

SECONDS_PER_CELL = 0.2
"""Minimum time per measured function in a sweep."""

MIN_REPEATS = 5
"""Minimum number of runs per measured function in a sweep."""

MIN_REACHED = 20
"""A position that was reached less often gets the acceptance rate of the position before it."""

_ROOM = 40
"""Tokens between a context and its capacity, so that no row finishes while it is timed."""


def measure_costs(
    pair: Pair,
    spec: SpecConfig,
    *,
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    draft_lens: Sequence[int] = (0, 1, 2, 4, 8),
    contexts: Sequence[int] = (216,),
    sampling: SamplingParams | None = None,
    num_sweeps: int = 3,
    on_cell: Callable[[str], None] = lambda cell: None,
) -> TableModel:
    """Times the compiled steps that a run uses, and drafting by itself.

    The time of a target pass is that of a step without its drafting, so it includes acceptance and commit. A context is
    measured in the capacity bucket that holds it and 40 more tokens.

    Args:
        pair: target and drafter.
        spec: acceptance rule and other options; its draft length is not used.
        batches: numbers of rows, which are batch buckets.
        draft_lens: draft-length buckets; 0 is regular decoding.
        contexts: committed tokens per row.
        sampling: default greedy.
        num_sweeps: sweeps over the whole grid, at least 1. The median is used, so that one slow sweep changes no cell.
        on_cell: called with a description of the next measurement.

    Raises:
        ValueError: if a grid is empty or not ascending, or there is no sweep.
    """
    if num_sweeps < 1:
        raise ValueError(f"num_sweeps={num_sweeps}: expected at least 1")
    for name, grid in {"batches": batches, "draft_lens": draft_lens, "contexts": contexts}.items():
        if not grid or list(grid) != sorted(set(grid)):
            raise ValueError(f"{name}={list(grid)}: expected ascending numbers, at least one")
    specs = step_specs(spec, sampling, draft_lens)
    draft_spec = step_specs(spec, sampling, [4])[4]
    drafts = np.zeros((num_sweeps, 3, len(batches), len(contexts)))
    steps = np.zeros((num_sweeps, len(batches), len(draft_lens), len(contexts)))
    for sweep, (i, batch), (k, context) in itertools.product(
        range(num_sweeps), enumerate(batches), enumerate(contexts)
    ):
        where = f"sweep {sweep + 1} of {num_sweeps}, batch {batch}, context {context}"
        on_cell(f"{where}: drafts")
        drafts[sweep, :, i, k] = _draft_seconds(pair, draft_spec, timed_state(pair, spec, sampling, batch, context))
        on_cell(f"{where}: steps of {', '.join(map(str, draft_lens))} drafts")
        seconds = time_steps(pair, specs, timed_state(pair, spec, sampling, batch, context))
        steps[sweep, i, :, k] = list(seconds.values())
    first, further, catch_up = np.median(drafts, axis=0)
    num = np.asarray(draft_lens)[None, :, None]
    drafting = np.where(num > 0, first[:, None] + np.maximum(num - 1, 0) * further[:, None], 0.0)
    step = np.median(steps, axis=0)
    target = np.maximum(step - drafting, 0.1 * step)
    table = (batches, np.asarray(draft_lens) + 1, contexts, target, first, further, catch_up)
    return TableModel(*(jnp.asarray(values, jnp.float32) for values in table))


def measure_acceptance(
    pair: Pair, prompts: Prompts, spec: SpecConfig, *, max_new_tokens: int = 64, sampling: SamplingParams | None = None
) -> tuple[float, ...]:
    """Decodes prompts with ``spec.draft_len`` drafts and returns the acceptance rate by position.

    Raises:
        ValueError: if there are no prompts.
    """
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one")
    metrics = generate(pair, prompts, spec, sampling=sampling, max_new_tokens=max_new_tokens, max_batch=8).metrics
    rates = list(metrics.acceptance_by_position)
    for position, num_reached in enumerate(metrics.num_reached_by_position):
        if position and num_reached < MIN_REACHED:
            rates[position] = rates[position - 1]
    return tuple(rates)


def measure_profile(
    pair: Pair, prompts: Prompts, spec: SpecConfig, *, name: str = "", max_new_tokens: int = 64, **grids: Any
) -> Profile:
    """Measures costs and acceptance; the arguments are those of `measure_costs` and `measure_acceptance`."""
    table = measure_costs(pair, spec, **grids)
    sampling = grids.get("sampling")
    rates = measure_acceptance(pair, prompts, spec, max_new_tokens=max_new_tokens, sampling=sampling)
    about = {
        "pair": name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "acceptance": find_rule(spec.acceptance).name,
        "date": datetime.date.today().isoformat(),
        "num_prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
    }
    return Profile(
        about, table, rates, pass_shape(require_model(pair.target, "a profile").config), draft_pass_shape(pair.drafter)
    )


def step_specs(spec: SpecConfig, sampling: SamplingParams | None, draft_lens: Sequence[int]) -> dict[int, SpecConfig]:
    """Returns the configuration with which a run compiles the step of each draft length."""
    steps = CompiledSteps("speculate", spec, is_greedy=(sampling or SamplingParams()).is_greedy)
    return {draft_len: bucket_spec(steps.spec, draft_len) for draft_len in draft_lens}


def compiled_step(pair: Pair, state: SpecState, spec: SpecConfig, draft_len: int) -> Callable:
    """Returns the compiled step that a run uses for `draft_len`."""
    return JIT_CACHE.get(speculate_step if draft_len else decode_step, pair, state, spec, donate_argnums=(1,))


def timed_state(pair: Pair, spec: SpecConfig, sampling: SamplingParams | None, batch: int, context: int) -> SpecState:
    """Returns the state after the prefill of `batch` rows of `context` arbitrary tokens."""
    rows = np.random.default_rng(0).integers(0, pair.target.vocab_size, (batch, context))
    room = capacity_bucket(context + _ROOM) - context
    return prefill(pair, rows.tolist(), spec, sampling=sampling, max_new_tokens=room, stop_tokens=())


def time_steps(pair: Pair, specs: Mapping[int, SpecConfig], state: SpecState) -> dict[int, float]:
    """Returns the median time of a step of each draft length, from dispatch until its info is on the host.

    All steps start with the same committed tokens, because the rows are reset before each step.
    """
    steps = {draft_len: compiled_step(pair, state, spec, draft_len) for draft_len, spec in specs.items()}
    rows = {name: np.asarray(getattr(state, name)) for name in ("lengths", "finish", "num_steps")}

    def run(draft_len: int) -> float:
        nonlocal state
        wanted = {"draft_lens": np.full(rows["lengths"].shape, draft_len, np.int32)}
        drafter_state = pair.drafter.commit(state.drafter_state, jnp.asarray(rows["lengths"]))
        state = state._replace(**jax.device_put(rows | wanted), drafter_state=drafter_state)
        jax.block_until_ready(state.lengths)
        start = time.perf_counter()
        state, info = steps[draft_len](pair, state, specs[draft_len])
        jax.device_get(info)
        return time.perf_counter() - start

    return _median_seconds(run, list(specs))


def _draft_seconds(pair: Pair, spec: SpecConfig, state: SpecState) -> tuple[float, float, float]:
    """Returns the times of proposing one draft, of a further draft, and of a pass that catches up."""
    many, num_reads = spec.num_drafts, 3
    keys = jax.jit(step_draft_keys, static_argnums=2)(state.keys, state.num_steps, many)
    rows, drafter_state = state._replace(target_cache=None, drafter_state=None), state.drafter_state
    if borrows_cache(pair.drafter):  # a copy, because it is donated
        cache = jax.tree.map(jnp.copy, state.target_cache)
        drafter_state = pair.drafter.borrow(drafter_state, cache, state.lengths)
    execute = JIT_CACHE.get(_propose, pair, drafter_state, rows, state.lengths, keys, spec, donate_argnums=(1,))

    def run(cell: tuple[int, int]) -> float:
        nonlocal drafter_state
        num_drafts, num_behind = cell
        wanted = jnp.full(len(rows.lengths), num_drafts, jnp.int32)
        drafter_state = pair.drafter.commit(drafter_state, rows.lengths - num_behind)
        drafter_state = pair.drafter.commit(drafter_state, rows.lengths)  # as after regular decoding
        jax.block_until_ready((drafter_state, wanted))
        start = time.perf_counter()
        proposal, drafter_state = execute(pair, drafter_state, rows, wanted, keys, spec)
        jax.block_until_ready(proposal)
        return time.perf_counter() - start

    cells = [(1, 0), (many, 0)]
    if draft_pass_shape(pair.drafter) is not None:
        cells.append((1, num_reads * CATCH_UP_CHUNK))
    one, several, *behind = _median_seconds(run, cells).values()
    further = max((several - one) / (many - 1), 0.0)
    return one, further, max((behind[0] - one) / num_reads, 0.0) if behind else 0.0


def _propose(
    pair: Pair, drafter_state: Any, rows: SpecState, num_wanted: Array, keys: Key[Array, "B G"], spec: SpecConfig
) -> tuple[Proposal, Any]:
    processors = LogitsProcessors(rows.sampling_arrays.processor_arrays, rows.prompt_lengths, rows.stop_tokens)
    context = DraftContext(rows.tokens, rows.lengths, num_wanted, rows.sampling_arrays, keys, processors)
    return pair.drafter.propose(drafter_state, context, spec.num_drafts, is_sampled=spec.acceptance != "greedy")


def _median_seconds[T: Hashable](run: Callable[[T], float], cells: Sequence[T]) -> dict[T, float]:
    """Returns the median of the times that `run` returns for each cell.

    Each cell runs once to warm up. Then the cells take turns, so that other work on the machine affects all of them.
    """
    for cell in cells:
        run(cell)
    seconds: dict[T, list[float]] = {cell: [] for cell in cells}
    num_rounds = 0
    while num_rounds < MIN_REPEATS or sum(map(sum, seconds.values())) < SECONDS_PER_CELL * len(cells):
        num_rounds += 1
        for cell in cells:
            seconds[cell].append(run(cell))
    return {cell: float(np.median(found)) for cell, found in seconds.items()}
