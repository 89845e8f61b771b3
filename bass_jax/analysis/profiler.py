"""Measures what the steps of a pair take on the device at hand, and how often its drafts are accepted."""

import dataclasses
import datetime
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import SpecConfig, capacity_bucket
from bass_jax.cost_model import Profile, TableModel, pass_shape
from bass_jax.cost_model.roofline import CATCH_UP_CHUNK
from bass_jax.decoding.compiled_steps import bucket_spec
from bass_jax.decoding.metrics import summarize
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.state import SpecState
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.drafters import DraftContext, EagleDrafter, ModelDrafter
from bass_jax.engine.generate import GenerateLoop, Prompts
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from bass_jax.sampling.keys import step_draft_keys
from bass_jax.sampling.logits_processors import LogitsProcessors

NUM_SWEEPS = 3
"""Over the whole grid; the median sweep counts, so that a minute in which a machine is slow spoils no cell."""

SECONDS_PER_CELL = 0.2
"""Measuring a cell in a sweep goes on until it has taken this long, and at least `MIN_REPEATS` times."""

MIN_REPEATS = 5

_ROOM = 40
"""Tokens between a measured context and its capacity: rows never finish while they are timed."""


def measure_costs(
    pair: Pair,
    spec: SpecConfig,
    *,
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    draft_lens: Sequence[int] = (0, 1, 2, 4, 8),
    contexts: Sequence[int] = (216,),
    sampling: SamplingParams | None = None,
    num_sweeps: int = NUM_SWEEPS,
    on_cell: Callable[[str], None] = lambda cell: None,
) -> TableModel:
    """Times the very executables that a run steps with, and rounds of drafting by themselves.

    A target pass is a step less its drafting: what judging and committing take belongs to it. Contexts are committed
    tokens per row; each is measured in the capacity bucket that holds it and 40 more.

    Args:
        pair: target and drafter.
        spec: the rule; its draft length does not matter.
        batches: buckets of rows.
        draft_lens: buckets; 0 is a regular step.
        contexts: committed tokens per row.
        sampling: default greedy.
        num_sweeps: over the whole grid, at least 1; the median counts.
        on_cell: told what is measured next.

    Raises:
        ValueError: if a grid is empty or not ascending, or there is no sweep.
    """
    if num_sweeps < 1:
        raise ValueError(f"num_sweeps={num_sweeps}: expected at least 1")
    grids = {"batches": batches, "draft_lens": draft_lens, "contexts": contexts}
    for name, grid in grids.items():
        if not grid or list(grid) != sorted(set(grid)):
            raise ValueError(f"{name}={list(grid)}: expected ascending numbers, at least one")
    sampling = sampling or SamplingParams()
    if spec.acceptance == "token" and sampling.is_greedy:
        spec = dataclasses.replace(spec, acceptance="greedy")
    specs = {draft_len: bucket_spec(spec, draft_len) for draft_len in draft_lens}
    drafts = np.zeros((num_sweeps, 3, len(batches), len(contexts)))
    steps = np.zeros((num_sweeps, len(batches), len(draft_lens), len(contexts)))
    for sweep, (i, batch), (k, context) in itertools.product(
        range(num_sweeps), enumerate(batches), enumerate(contexts)
    ):
        where = f"sweep {sweep + 1} of {num_sweeps}, batch {batch}, context {context}"
        make = functools.partial(timed_state, pair, spec, sampling, batch, context)
        on_cell(f"{where}: drafts")
        drafts[sweep, :, i, k] = _draft_seconds(pair, spec, make())
        on_cell(f"{where}: steps of {', '.join(map(str, draft_lens))} drafts")
        steps[sweep, i, :, k] = list(step_seconds(pair, specs, make()).values())
    first, further, catch_up = np.median(drafts, axis=0)
    num = np.asarray(draft_lens)[None, :, None]
    drafting = np.where(num > 0, first[:, None] + np.maximum(num - 1, 0) * further[:, None], 0.0)
    seconds = np.median(steps, axis=0)
    target = np.maximum(seconds - drafting, 0.1 * seconds)
    grid = (batches, np.asarray(draft_lens) + 1, contexts, target, first, further, catch_up)
    return TableModel(*(jnp.asarray(values, jnp.float32) for values in grid))


def measure_acceptance(
    pair: Pair,
    prompts: Prompts,
    spec: SpecConfig,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    batch: int = 8,
) -> tuple[float, ...]:
    """Decodes real prompts with ``spec.draft_len`` drafts and returns the acceptance by position.

    Positions that were seldom reached follow the last that was reached 20 times.

    Raises:
        ValueError: if there are no prompts.
    """
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one")
    infos = []
    for start in range(0, len(prompts), batch):
        run = GenerateLoop(pair, prompts[start : start + batch], spec, sampling=sampling, max_new_tokens=max_new_tokens)
        infos += list(run)
    rates = list(summarize(infos).acceptance_by_position)
    accepted = np.concatenate([info.num_accepted[info.is_active] for info in infos])
    num_reached = [int((accepted >= position).sum()) for position in range(len(rates))]
    for position in range(1, len(rates)):
        if num_reached[position] < 20:
            rates[position] = rates[position - 1]
    return tuple(float(rate) for rate in rates)


def measure_profile(
    pair: Pair, prompts: Prompts, spec: SpecConfig, *, name: str = "", max_new_tokens: int = 64, **grids: Any
) -> Profile:
    """Measures costs and acceptance; arguments are those of `measure_costs` and `measure_acceptance`."""
    sampling = grids.get("sampling")
    table = measure_costs(pair, spec, **grids)
    rates = measure_acceptance(pair, prompts, spec, max_new_tokens=max_new_tokens, sampling=sampling)
    about = {
        "pair": name, "device": jax.devices()[0].device_kind, "jax": jax.__version__, "acceptance": spec.acceptance,
        "date": datetime.date.today().isoformat(), "num_prompts": len(prompts), "max_new_tokens": max_new_tokens,
    }  # fmt: skip
    draft_shape = (
        pass_shape(pair.drafter.model.config) if isinstance(pair.drafter, ModelDrafter | EagleDrafter) else None
    )
    return Profile(about, table, rates, pass_shape(pair.target.config), draft_shape)


def timed_state(pair: Pair, spec: SpecConfig, sampling: SamplingParams, batch: int, context: int) -> SpecState:
    """Rows of `context` arbitrary tokens, in the capacity that they and some more need."""
    random = np.random.default_rng(0)
    rows = random.integers(0, pair.target.config.vocab_size, (batch, context))
    room = capacity_bucket(context + _ROOM) - context
    return prefill(pair, rows.tolist(), spec, sampling=sampling, max_new_tokens=room, stop_tokens=())


def step_seconds(pair: Pair, specs: dict[int, SpecConfig], state: SpecState) -> dict[int, float]:
    """Median time of a step of each length as `bass_jax.engine.generate.GenerateLoop` takes it, the rows put back after each.

    The lengths take turns, so that whatever else the machine does is shared among them.
    """
    steps = {
        draft_len: JIT_CACHE.get(speculate_step if draft_len else decode_step, pair, state, spec, donate_argnums=(1,))
        for draft_len, spec in specs.items()
    }
    rows = {name: np.asarray(getattr(state, name)) for name in ("lengths", "finish", "num_steps")}

    def once(draft_len: int) -> float:
        nonlocal state
        wanted = {"draft_lens": np.full(rows["lengths"].shape, draft_len, np.int32)}
        drafter = pair.drafter.commit(state.drafter, jnp.asarray(rows["lengths"]))
        state = state._replace(**jax.device_put(rows | wanted), drafter=drafter)
        jax.block_until_ready(state.lengths)
        start = time.perf_counter()
        state, info = steps[draft_len](pair, state, specs[draft_len])
        jax.device_get(info)
        return time.perf_counter() - start

    for draft_len in specs:  # warm
        once(draft_len)
    seconds: dict[int, list[float]] = {draft_len: [] for draft_len in specs}
    num_rounds, total = 0, 0.0
    while num_rounds < MIN_REPEATS or total < SECONDS_PER_CELL * len(specs):
        num_rounds, total = num_rounds + 1, sum(map(sum, seconds.values()))
        for draft_len in specs:
            seconds[draft_len].append(once(draft_len))
    return {draft_len: statistics.median(found) for draft_len, found in seconds.items()}


def _draft_seconds(pair: Pair, spec: SpecConfig, state: SpecState) -> tuple[float, float, float]:
    """Times of a round of one draft, of a further draft, and of a pass that catches up."""
    is_sampled = spec.acceptance != "greedy"
    num_rows, many = len(state.lengths), 4
    keys = jax.jit(step_draft_keys, static_argnums=2)(state.keys, state.num_steps, many)

    def propose(pair, drafter_state, rows, wanted, keys):
        tokens, lengths, sampling_arrays, prompt_lengths, stop_tokens = rows
        processors = LogitsProcessors(sampling_arrays.processor_arrays, prompt_lengths, stop_tokens)
        context = DraftContext(tokens, lengths, wanted, sampling_arrays, keys, processors)
        return pair.drafter.propose(drafter_state, context, many, is_sampled=is_sampled)

    def seconds(num_wanted: int, num_behind: int = 0) -> float:
        wanted = jnp.full(num_rows, num_wanted, jnp.int32)
        rows = (state.tokens, state.lengths, state.sampling_arrays, state.prompt_lengths, state.stop_tokens)
        execute = JIT_CACHE.get(propose, pair, state.drafter, rows, wanted, keys, donate_argnums=(1,))

        def once() -> float:
            nonlocal state
            drafter_state = pair.drafter.commit(state.drafter, state.lengths - num_behind)
            drafter_state = pair.drafter.commit(drafter_state, state.lengths)  # as after regular decoding
            jax.block_until_ready(drafter_state)
            start = time.perf_counter()
            proposal, drafter_state = execute(pair, drafter_state, rows, wanted, keys)
            jax.block_until_ready(proposal)
            seconds = time.perf_counter() - start
            state = state._replace(drafter=drafter_state)
            return seconds

        return _median(once)

    one = seconds(1)
    further = max((seconds(many) - one) / (many - 1), 0.0)
    if not isinstance(pair.drafter, ModelDrafter | EagleDrafter):
        return one, further, 0.0
    num_reads = 3
    return one, further, max((seconds(1, num_reads * CATCH_UP_CHUNK) - one) / num_reads, 0.0)


def _median(once: Callable[[], float]) -> float:
    once()  # warm
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or sum(seconds) < SECONDS_PER_CELL:
        seconds.append(once())
    return statistics.median(seconds)
