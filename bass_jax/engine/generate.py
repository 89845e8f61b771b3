"""`generate` and `stream`: decode a set of prompts with the host loop."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.config import SpecConfig, batch_bucket
from bass_jax.decoding.candidates import check_candidates
from bass_jax.decoding.compiled_steps import CompiledSteps
from bass_jax.decoding.metrics import per_token_latency, summarize
from bass_jax.decoding.options import DecodeOptions
from bass_jax.decoding.outputs import Generation, StreamEvent, Timings
from bass_jax.decoding.pair import Pair, check_pair
from bass_jax.decoding.prefill import FirstBatch
from bass_jax.decoding.prompt_layout import encode_texts, lay_out_prompts
from bass_jax.decoding.state import SpecState, StepInfo
from bass_jax.decoding.stop_strings import StopStrings
from bass_jax.decoding.traces import TraceWriter
from bass_jax.drafters.protocols import max_draft_len_of
from bass_jax.engine.device_executor import DeviceExecutor
from bass_jax.engine.engine_config import EngineConfig
from bass_jax.engine.loop import Loop
from bass_jax.engine.request import Request, RequestHandle, RequestOutput
from bass_jax.engine.scheduler import Scheduler
from bass_jax.runtime.checks import check_callable, check_kind, check_sequence, check_texts
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams

type Prompts = Sequence[str] | Sequence[Sequence[int] | np.ndarray]
"""Texts, or token ids."""


def generate(
    pair: Pair,
    prompts: Prompts,
    spec: SpecConfig | None = None,
    options: DecodeOptions | None = None,
    *,
    trace: TraceWriter | None = None,
    on_step: Callable[[StepInfo], None] | None = None,
    **changes: Any,
) -> Generation:
    """Decodes prompts until all rows have finished, by `bass_jax.speculate_step` or the step of ``options.step``.

    At most ``options.max_batch`` rows are decoded at once. A row that waits takes the place of a finished one. Each
    combination of batch size, draft-length bucket and capacity is compiled once per process.

    Args:
        pair: target and drafter.
        prompts: texts, or token ids. A text is asked in the tokenizer's chat template if it has one; with ``raw=True``
            it is continued as it is.
        spec: default ``SpecConfig()``. If all rows are greedy, the token and the multi-draft rule run as the greedy
            rule, which gives the same tokens without random numbers.
        options: default ``DecodeOptions()``.
        trace: records the drafts of each step, as one run; implies ``fixed_batch=True``.
        on_step: called on the host with the info of each step.
        changes: fields of `DecodeOptions`, such as ``max_new_tokens=64``, that replace those of `options`.

    Raises:
        ValueError: as `bass_jax.prefill`; if an option is invalid; or if prompts are texts and there is no tokenizer.
    """
    check_kind("trace", trace, TraceWriter | None)
    check_callable("on_step", on_step)
    if trace is not None:
        spec = dataclasses.replace(spec or SpecConfig(), record_drafts=True)
        changes["fixed_batch"] = True
    loop = GenerateLoop(pair, prompts, spec, options, **changes)
    if trace is not None:
        begin_trace(trace, loop)
    for info in loop:
        if trace is not None:
            trace.step(info, loop.step_seconds[-1], loop.num_rows)
        if on_step is not None:
            on_step(info)
    if trace is not None:
        trace.end()
    return loop.result()


def stream(
    pair: Pair,
    prompts: Prompts,
    spec: SpecConfig | None = None,
    options: DecodeOptions | None = None,
    **changes: Any,
) -> Iterator[StreamEvent]:
    """Yields the tokens of each row after every step. The arguments are those of `generate`.

    The joined texts of a row equal its text in the result of `generate`.
    """
    loop = GenerateLoop(pair, prompts, spec, options, **changes)
    for _ in loop:
        yield from loop.events


def begin_trace(trace: TraceWriter, loop: "GenerateLoop", **about: Any) -> None:
    """Begins a run of a trace with the description of `loop` that a replay needs, and further entries."""
    trace.begin(
        step=loop.options.step,
        acceptance=find_rule(loop.spec.acceptance).name,
        is_greedy=loop.is_greedy,
        prompt_lengths=loop.prompt_lengths,
        limits=loop.limits,
        capacity=loop.state.tokens.shape[1],
        device=jax.devices()[0].device_kind,
        **about,
    )


class GenerateLoop:
    """Runs the host loop over the rows of a set of prompts. Iterating over it runs the steps and yields their infos.

    Attributes:
        options: of the run.
        spec: of the steps.
        is_greedy: whether all rows are greedy.
        num_rows: the number of samples of all prompts.
        prompt_lengths: ``[num_rows]`` int32.
        limits: ``[num_rows]`` int32, the largest number of new tokens.
        events: of the last step, one per row that took part.
        infos: of the steps so far, on the host.
        step_seconds: wall time of each step, from the dispatch, or the end of the step before if that is later, until
            its results are on the host and the next step is planned. Planning while the device runs another step does
            not count. Reading a prompt between two steps counts for the second one.
        requests: for each step ``[B]`` int32, the row index in each row of the batch; -1 for a free row.
        prefill_seconds: time to read the prompts of the first batch, without compilation.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Prompts,
        spec: SpecConfig | None = None,
        options: DecodeOptions | None = None,
        **changes: Any,
    ):
        """Compiles the steps and reads the prompts of the first batch. Arguments and errors are those of `generate`."""
        check_pair(pair)
        check_kind("spec", spec, SpecConfig | None)
        check_kind("options", options, DecodeOptions | None)
        self.options = options = dataclasses.replace(options or DecodeOptions(), **changes)
        spec, sampling = spec or SpecConfig(), options.sampling or SamplingParams()
        self.is_greedy = sampling.is_greedy
        steps = CompiledSteps(options.step, spec, self.is_greedy, options.policy, max_draft_len_of(pair.drafter))
        if options.step == "speculate":  # The policy may choose no drafts, and the step then checks nothing.
            check_candidates(pair, steps.spec, find_rule(steps.spec.acceptance))
        self.spec, self._tokenizer = steps.spec, pair.tokenizer
        # This checks the stop strings before anything is compiled.
        StopStrings(pair.tokenizer, options.stop_strings, 0)
        self._compile_seconds, self._num_compiled = JIT_CACHE.compile_seconds, JIT_CACHE.num_compiled
        layout = lay_out_prompts(pair, encode_prompts(pair, prompts, raw=options.raw), spec, options)
        self.num_rows = layout.num_rows
        self.prompt_lengths = np.asarray(layout.rows.prompt_lengths)[: self.num_rows]
        self.limits = np.asarray(layout.rows.limits)[: self.num_rows] - self.prompt_lengths
        is_fixed = options.fixed_batch or options.step == "synchronized"
        num_slots = self.num_rows if is_fixed else min(self.num_rows, options.max_batch)
        batch = FirstBatch(pair, layout, num_slots)
        size = batch_bucket(num_slots)
        smaller = () if is_fixed else sorted({batch_bucket(one) for one in options.shrink_to if one <= size // 2})
        config = EngineConfig(
            num_slots=num_slots,
            capacity=batch.rows.tokens.shape[1],
            max_waiting=self.num_rows,
            buckets=(*smaller, size),
        )
        shapes = batch.shapes()
        state = self._read(batch) if shapes is None else shapes
        # Requests arrive in the order of the rows, so a handle's order is its row in the layout.
        is_refilled = num_slots < self.num_rows
        self._executor = DeviceExecutor(
            pair, steps, config, lambda handle: layout.row(handle.order), state, is_refilled=is_refilled
        )
        # A thread compiles it while the first step is compiled: `bass-jax generate "hi"` takes 9.4 s instead of 11.1
        # without compiled functions on disk (medians of three, two cores, 2026-11-27). Not before the executor is
        # made, whose measurements it would spoil.
        batch.compile()
        if options.warm_up:
            self._executor.compile_steps()
        if shapes is not None:
            self._executor.fill(self._read(batch))
        self._loop = Loop(Scheduler(config), self._executor, is_pipelined=False)
        self._handles = self._make_handles(np.asarray(layout.rows.tokens), layout.num_samples)
        self._executor.start(self._handles[:num_slots])
        self._loop.start(self._handles[:num_slots])
        for handle in self._handles[num_slots:]:
            self._loop.submit(handle)
        self.events: list[StreamEvent] = []
        self.infos: list[StepInfo] = []
        self.step_seconds: list[float] = []
        self.requests: list[np.ndarray] = []

    def _read(self, batch: FirstBatch) -> SpecState:
        start, compile_seconds = time.perf_counter(), JIT_CACHE.compile_seconds
        state = jax.block_until_ready(batch.read())
        self.prefill_seconds = time.perf_counter() - start - (JIT_CACHE.compile_seconds - compile_seconds)
        return state

    def _make_handles(self, tokens: np.ndarray, num_samples: int) -> list[RequestHandle]:
        # Samples that follow each other share the array of their prompt, so that it is read once for all of them. Their
        # sampling parameters are in the rows of the layout.
        prompts = [tokens[row, : self.prompt_lengths[row]] for row in range(0, self.num_rows, num_samples)]
        texts = [
            None if self._tokenizer is None else StopStrings(self._tokenizer, self.options.stop_strings, 1)
            for _ in range(self.num_rows)
        ]
        return [
            RequestHandle(Request(prompts[row // num_samples], int(self.limits[row])), text=texts[row])
            for row in range(self.num_rows)
        ]

    def __iter__(self) -> Iterator[StepInfo]:
        while self._loop.advance():
            step = self._loop.last
            assert step is not None, "every advance runs a step: without running rows a whole prompt is read first"
            self.infos.append(step.info)
            self.step_seconds.append(step.seconds)
            self.requests.append(self._loop.requests)
            self.events = [
                StreamEvent(handle.order, event.tokens, event.text, event.finish_reason)
                for handle, event in self._loop.events
            ]
            yield step.info

    @property
    def state(self) -> SpecState:
        """The state of the batch on the device."""
        return self._executor.state

    @state.setter
    def state(self, state: SpecState) -> None:
        self._executor.state = state

    @property
    def compile_seconds(self) -> float:
        """Compile time of this process in seconds since the run began."""
        return JIT_CACHE.compile_seconds - self._compile_seconds

    @property
    def warm_up_seconds(self) -> dict[int, float]:
        """Draft-length bucket → compile time of its step in seconds."""
        return self._executor.steps.seconds

    def row(self, row: int) -> RequestOutput:
        """Returns the output of `row` so far."""
        return self._handles[row].output()

    def result(self) -> Generation:
        """Returns the outputs of all rows. Call it after the iteration has ended."""
        rows = [self.row(index) for index in range(self.num_rows)]
        return Generation(
            tokens=[row.tokens for row in rows],
            texts=None if self._tokenizer is None else [row.text or "" for row in rows],
            logprobs=[row.logprobs for row in rows],
            token_logprobs=None
            if self.spec.num_logprobs is None
            else [row.token_logprobs for row in rows if row.token_logprobs is not None],
            finish_reasons=[row.finish_reason or "running" for row in rows],
            metrics=summarize(self.infos),
            latency=per_token_latency(self.infos, self.step_seconds, self.requests),
            timings=Timings(
                prefill=self.prefill_seconds,
                decode=sum(self.step_seconds),
                compile=self.compile_seconds,
                num_compiled=JIT_CACHE.num_compiled - self._num_compiled,
                steps=tuple(self.step_seconds),
                warm_up=dict(self.warm_up_seconds),
            ),
            infos=self.infos,
            requests=self.requests,
            is_lossless=find_rule(self.spec.acceptance).lossless,
        )


def encode_prompts(pair: Pair, prompts: Any, *, raw: bool = False) -> Any:
    """Returns the token ids of texts; token ids are returned as they are.

    Raises:
        ValueError: if `prompts` is no sequence, mixes texts and token ids, or if there is no tokenizer for texts.
    """
    check_sequence("prompts", prompts, "a sequence of texts or of token ids, such as [prompt]")
    if not any(isinstance(prompt, str) for prompt in prompts):
        return prompts
    check_texts("prompts", prompts)
    return encode_texts(pair, prompts, raw=raw)
