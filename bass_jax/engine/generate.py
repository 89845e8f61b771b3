"""Loops over steps: a whole batch, a stream, a loop that stays on the device."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.config import MAX_SAMPLES, SpecConfig
from bass_jax.decoding.compiled_steps import CompiledSteps, bucket_spec
from bass_jax.decoding.metrics import per_token_latency, summarize
from bass_jax.decoding.outputs import Generation, RowResult, StreamEvent, Timings
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.policy_runner import PolicyRunner
from bass_jax.decoding.prefill import begin_reading, lay_out_prompts, read_prompts
from bass_jax.decoding.state import FinishReason, StepInfo, TokenLogprobs
from bass_jax.decoding.stop_strings import StopStrings
from bass_jax.decoding.traces import TraceWriter
from bass_jax.policies import Policy
from bass_jax.policies.protocol import plan_bucket
from bass_jax.runtime.checks import check_callable, check_flag, check_integer, check_kind, check_sequence, check_texts
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.sampling import SamplingParams
from bass_jax.typing import Array, Key

type Prompts = Sequence[str] | Sequence[Sequence[int] | np.ndarray]
"""Texts, or token ids."""


def generate(
    pair: Pair,
    prompts: Prompts,
    spec: SpecConfig | None = None,
    *,
    sampling: SamplingParams | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    num_samples: int = 1,
    key: Key[Array, ""] | None = None,
    seeds: Sequence[int] | None = None,
    stop_tokens: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    step: str = "speculate",
    policy: str | Policy | None = None,
    warm_up: bool = True,
    trace: TraceWriter | None = None,
    on_step: Callable[[StepInfo], None] | None = None,
) -> Generation:
    """Decodes a batch to its end; one executable per bucket.

    Args:
        pair: target and drafter.
        prompts: texts (the pair's tokenizer encodes them as they are) or token ids.
        spec: default ``SpecConfig()``. Where every row is greedy, the token and the multi-draft rule are run as the
            greedy rule, which is the same thing without the noise.
        sampling: default greedy.
        max_new_tokens: limit per row, or one for all.
        num_samples: rows per prompt.
        key: source of the rows' noise; default ``jax.random.key(0)``.
        seeds: a seed per row instead.
        stop_tokens: default those of the pair's tokenizer.
        stop_strings: a row ends with the token that completes one of these; needs a tokenizer.
        step: ``"speculate"``; ``"decode"`` for regular decoding, the baseline; ``"synchronized"``, see
            `bass_jax.decoding.baselines.synchronized_step`; or ``"exhaustive"``, see
            `bass_jax.decoding.baselines.exhaustive_step`.
        policy: chooses draft lengths step by step, in place of ``spec.draft_len``: a `bass_jax.policies.Policy`, the
            name of one, or ``"module:name"``. The tokens are the same, or have the same distribution, under all of
            them.
        warm_up: compiles all draft-length buckets of `policy` before the first step, rather than when they are
            first wanted.
        trace: records what decided over each draft, as one run.
        on_step: called with each step's info, on the host.

    Raises:
        ValueError: as `bass_jax.prefill` does; if `step` is unknown; if texts come without a tokenizer.
    """
    check_run(pair, spec, sampling, warm_up)
    check_kind("trace", trace, TraceWriter | None)
    check_callable("on_step", on_step)
    if trace is not None:
        spec = dataclasses.replace(spec or SpecConfig(), record_drafts=True)
    run = Run(
        pair, prompts, spec, sampling=sampling, max_new_tokens=max_new_tokens, num_samples=num_samples, key=key,
        seeds=seeds, stop_tokens=stop_tokens, stop_strings=stop_strings, step=step, policy=policy, warm_up=warm_up,
    )  # fmt: skip
    if trace is not None:
        begin_trace(trace, run)
    for info in run:
        if trace is not None:
            trace.step(info, run.step_seconds[-1], run.num_rows)
        if on_step is not None:
            on_step(info)
    if trace is not None:
        trace.end()
    return run.result()


def begin_trace(trace: TraceWriter, run: "Run", **about: Any) -> None:
    """Begins a run of a trace with what a replay needs to know of `run`, and `about` it."""
    prompts = np.asarray(run.state.prompt_lengths)[: run.num_rows]
    trace.begin(
        step=run.step_name, acceptance=run.spec.acceptance, is_greedy=run.is_greedy, prompt_lengths=prompts,
        limits=np.asarray(run.state.limits)[: run.num_rows] - prompts, capacity=run.state.target_cache.capacity,
        device=jax.devices()[0].device_kind, **about,
    )  # fmt: skip


def stream(pair: Pair, prompts: Prompts, spec: SpecConfig | None = None, **options) -> Iterator[StreamEvent]:
    """Yields the tokens of every row as they are accepted; `options` are those of `generate` but `on_step`.

    A row's texts, joined, are its text in `generate`'s result.
    """
    run = Run(pair, prompts, spec, **options)
    for _ in run:
        yield from run.events


def compile_ahead(
    pair: Pair,
    prompts: Prompts,
    spec: SpecConfig | None = None,
    *,
    sampling: SamplingParams | None = None,
    step: str = "speculate",
    policy: str | Policy | None = None,
    **options: Any,
) -> None:
    """Has the prefill and the steps that `generate` will run for these prompts compiled by other threads.

    Meant for a pair whose weights are still being read; see `bass_jax.load_pair`. What it made serves every call of the
    same shapes. What a policy itself computes is not among it, and nothing is compiled where the pair lies on a mesh.

    Args:
        pair: its arrays can be `jax.ShapeDtypeStruct`.
        prompts: as for `generate`.
        spec: as for `generate`.
        sampling: as for `generate`.
        step: as for `generate`.
        policy: as for `generate`.
        options: of `generate`: ``max_new_tokens``, ``num_samples``, ``key``, ``seeds``, ``stop_tokens``.

    Raises:
        ValueError: as `generate`.
    """
    spec, sampling = spec or SpecConfig(), sampling or SamplingParams()
    steps = CompiledSteps(step, spec, sampling, policy)
    layout = lay_out_prompts(pair, _token_ids(pair, prompts), spec, sampling=sampling, **options)
    if (state := begin_reading(pair, layout)) is not None:
        steps.begin(pair, state)


def check_run(pair: Any, spec: Any, sampling: Any, warm_up: Any) -> None:
    """Raises a `ValueError` for what is of another type than `generate` asks for."""
    check_kind("pair", pair, Pair)
    check_kind("spec", spec, SpecConfig | None)
    check_kind("sampling", sampling, SamplingParams | None)
    check_flag("warm_up", warm_up)


def _token_ids(pair: Pair, prompts: Prompts) -> Any:
    check_sequence("prompts", prompts, "a sequence of texts or of token ids, such as [prompt]")
    if not any(isinstance(prompt, str) for prompt in prompts):
        return prompts
    check_texts("prompts", prompts)
    if pair.tokenizer is None:
        raise ValueError("prompts are texts: expected token ids, because the pair has no tokenizer")
    return pair.tokenizer.encode_batch(prompts)


class Run:
    """One batch in flight: iterating it takes the steps; `generate` and `stream` are loops over it.

    Attributes:
        num_rows: requests; rows of the state past them are fillers.
        state: as it stands.
        events: what the last step emitted, per row that took part in it.
        infos: one per step so far, on the host.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Prompts,
        spec: SpecConfig | None = None,
        *,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | Sequence[int] = 128,
        num_samples: int = 1,
        key: Key[Array, ""] | None = None,
        seeds: Sequence[int] | None = None,
        stop_tokens: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        step: str = "speculate",
        policy: str | Policy | None = None,
        warm_up: bool = True,
    ):
        """Reads the prompts and compiles the steps; arguments and errors are those of `generate`."""
        check_run(pair, spec, sampling, warm_up)
        self.pair, self.step_name = pair, step
        spec, sampling = spec or SpecConfig(), sampling or SamplingParams()
        self.is_greedy = sampling.is_greedy
        self._steps = CompiledSteps(step, spec, sampling, policy)
        self.spec = self._steps.spec
        rows = _token_ids(pair, prompts)
        self.num_rows = len(rows) * check_integer("num_samples", num_samples, 1, MAX_SAMPLES)
        self._stops = StopStrings(pair.tokenizer, stop_strings, self.num_rows)
        compiled = JIT_CACHE.compile_seconds
        self._num_compiled = JIT_CACHE.num_compiled
        start = time.perf_counter()
        layout = lay_out_prompts(
            pair, rows, spec, key=key, seeds=seeds, sampling=sampling, max_new_tokens=max_new_tokens,
            num_samples=num_samples, stop_tokens=stop_tokens,
        )  # fmt: skip
        if warm_up and (shapes := begin_reading(pair, layout)) is not None:
            self._steps.begin(pair, shapes)
        self.state = read_prompts(pair, layout)
        jax.block_until_ready(self.state)
        compiled_seconds = JIT_CACHE.compile_seconds - compiled
        self.prefill_seconds = time.perf_counter() - start - compiled_seconds
        self.infos: list[StepInfo] = []
        self.step_seconds: list[float] = []
        self._policy_runner = None
        self._num_wanted = 0
        if self._steps.policy is not None:
            self._policy_runner = PolicyRunner(self._steps.policy, self.state)
            self.state = self._policy_runner.plan(self.state)
            self._num_wanted = int(self._policy_runner.num_wanted)
        for bucket in self._steps.buckets if warm_up else ():
            self._steps.get(bucket, pair, self.state)
        self.compile_seconds = JIT_CACHE.compile_seconds - compiled
        self._tokens: list[list[np.ndarray]] = [[] for _ in range(self.num_rows)]
        self._logprobs: list[list[np.ndarray]] = [[] for _ in range(self.num_rows)]
        self._distributions: list[list[TokenLogprobs]] = [[] for _ in range(self.num_rows)]
        self._finish = np.zeros(self.num_rows, np.int32)
        self.events: list[StreamEvent] = []

    def __iter__(self) -> Iterator[StepInfo]:
        seconds = 0.0
        while (self._finish == FinishReason.RUNNING).any():
            bucket = plan_bucket(self._steps.buckets, self._num_wanted)
            compiled = JIT_CACHE.compile_seconds
            step = self._steps.get(bucket, self.pair, self.state)
            self.compile_seconds += JIT_CACHE.compile_seconds - compiled
            start = time.perf_counter()
            self.state, info = step(self.pair, self.state, bucket_spec(self.spec, bucket))
            if self._policy_runner is None:
                info = jax.device_get(info)
            else:  # Counts and the next bucket are read in one go.
                self.state = self._policy_runner.update(self.state, info, seconds)
                info, num_wanted = jax.device_get((info, self._policy_runner.num_wanted))
                self._num_wanted = int(num_wanted)
            seconds = time.perf_counter() - start
            self.step_seconds.append(seconds)
            yield self._record(info)

    @property
    def warm_up_seconds(self) -> dict[int, float]:
        """Seconds that the run has waited for the step of each draft-length bucket."""
        return self._steps.seconds

    def _record(self, info: StepInfo) -> StepInfo:
        """Keeps what the rows emitted, cut at a stop string, and says so to the device."""
        host: dict[str, Any] = jax.tree.map(np.array, info._asdict())
        info = StepInfo(**host)
        self.events = []
        is_cut = False
        for row in np.flatnonzero(info.is_active[: self.num_rows]).tolist():
            num = info.num_emitted[row]
            is_finished = bool(info.finish[row] != FinishReason.RUNNING)
            num_kept, text = self._stops.push(row, host["tokens"][row, :num], is_finished)
            if self._stops.is_hit[row]:
                is_cut |= not is_finished or num_kept < num
                host["num_emitted"][row], host["finish"][row] = num_kept, FinishReason.STOP
                host["tokens"][row, num_kept:], host["logprobs"][row, num_kept:] = -1, 0.0
            self._tokens[row].append(host["tokens"][row, :num_kept])
            self._logprobs[row].append(host["logprobs"][row, :num_kept])
            if info.token_logprobs is not None:
                self._distributions[row].append(
                    TokenLogprobs(*(field[row, :num_kept] for field in info.token_logprobs))
                )
            self._finish[row] = info.finish[row]
            reason = None if self._finish[row] == FinishReason.RUNNING else _reason(self._finish[row])
            self.events.append(StreamEvent(row, self._tokens[row][-1], text, reason))
        if is_cut:
            self.state = self.state._replace(finish=jnp.asarray(info.finish))
        self.infos.append(info)
        return info

    def row(self, row: int) -> RowResult:
        """Returns what `row` has come to so far."""
        tokens, logprobs = self._tokens[row], self._logprobs[row]
        return RowResult(
            tokens=np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            text=self._stops.text(row) if self.pair.tokenizer is not None else None,
            logprobs=np.concatenate(logprobs) if logprobs else np.zeros(0, np.float32),
            token_logprobs=jax.tree.map(lambda *parts: np.concatenate(parts), *token_logprobs)
            if (token_logprobs := self._distributions[row])
            else None,
            finish_reason=_reason(self._finish[row]),
        )

    def result(self) -> Generation:
        """Returns what the batch came to; call it when the iteration has ended."""
        rows = [self.row(index) for index in range(self.num_rows)]
        return Generation(
            tokens=[row.tokens for row in rows],
            texts=None if self.pair.tokenizer is None else [row.text or "" for row in rows],
            logprobs=[row.logprobs for row in rows],
            token_logprobs=[row.token_logprobs for row in rows if row.token_logprobs is not None]
            if self.spec.num_logprobs is not None
            else None,
            finish_reasons=[row.finish_reason for row in rows],
            summary=summarize(self.infos),
            latency=per_token_latency(self.infos, self.step_seconds),
            timings=Timings(
                prefill=self.prefill_seconds,
                decode=sum(self.step_seconds),
                compile=self.compile_seconds,
                num_compiled=JIT_CACHE.num_compiled - self._num_compiled,
                steps=tuple(self.step_seconds),
                warm_up=dict(self.warm_up_seconds),
            ),
            infos=self.infos,
            is_lossless=find_rule(self.spec.acceptance).lossless,
        )


def _reason(finish: int | np.integer) -> str:
    return FinishReason(int(finish)).name.lower()
