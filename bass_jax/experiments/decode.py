"""Decodes the batches of a run, and records their samples and times."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bass_jax.analysis.utilization import measure_utilization
from bass_jax.config import SpecConfig
from bass_jax.cost_model import Device, draft_pass_shape, pass_shape
from bass_jax.decoding.metrics import per_token_latency, summarize
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.traces import TraceWriter
from bass_jax.engine import RequestOutput
from bass_jax.engine.generate import GenerateLoop, begin_trace
from bass_jax.experiments.experiment_config import ExperimentConfig
from bass_jax.experiments.plan import PlannedBatch, row_seed
from bass_jax.experiments.run_directory import Record
from bass_jax.experiments.tasks import Problem
from bass_jax.models import require_model
from bass_jax.policies import find_policy
from bass_jax.runtime.files import finite

OVER_BUDGET = "budget"
"""The finish reason of a row that the time budget stopped."""

_NUM_WARM_UP_STEPS = 2


class BatchDecoder(NamedTuple):
    """Decodes the batches of a run."""

    config: ExperimentConfig
    problems: Sequence[Problem]  # of the run
    prompts: Sequence[np.ndarray]  # token ids of each problem, [n] int32
    stop_strings: Sequence[str]
    device: Device  # whose peak FLOP/s are the reference of utilization

    def decode(
        self, batch: PlannedBatch, pair: Pair, start: float, trace: Path | None = None
    ) -> tuple[Record, list[Record]]:
        """Decodes a batch until all rows have finished or the time budget of its group is used up.

        The clock counts prefill and steps, without compilation. If anything was compiled, the batch is started again
        after some steps, so that its time contains no one-off work.

        Args:
            batch: the rows.
            pair: target and drafter.
            start: seconds on the group's clock.
            trace: file to record the batch in.

        Returns:
            ``(batch record, sample records)``.
        """
        budget = math.inf if self.config.budget is None else self.config.budget
        record = {**_place(batch), "part": batch.part, "num_rows": len(batch.rows)}
        if start >= budget:
            samples = [self._sample(batch, index, None, start) for index in range(len(batch.rows))]
            return record | {"start": start, "end": start}, samples
        loop = self._loop(batch, pair)
        if loop.compile_seconds:
            for _ in itertools.islice(loop, _NUM_WARM_UP_STEPS):
                pass
            loop = self._loop(batch, pair)
        elapsed = start + loop.prefill_seconds
        ends = [0.0] * len(batch.rows)
        writer = None if trace is None else _begin_trace(trace, loop)
        for info in loop:
            elapsed += loop.step_seconds[-1]
            if writer is not None:
                writer.step(info, loop.step_seconds[-1], loop.num_rows)
            for event in loop.events:
                ends[event.row] = elapsed
            if elapsed >= budget:
                break
        if writer is not None:
            writer.end()
            writer.close()
        samples = [self._sample(batch, index, loop.row(index), ends[index]) for index in range(len(batch.rows))]
        return record | {"start": round(start, 6), "end": round(elapsed, 6)} | self._measures(
            batch, pair, loop
        ), samples

    def _loop(self, batch: PlannedBatch, pair: Pair) -> GenerateLoop:
        method, num_samples = batch.variant.method, batch.variant.num_samples
        is_traced = self.config.trace and method.step == "speculate"
        profile = {} if method.profile is None else {"profile": method.profile}
        problems = [row.problem for row in batch.rows]
        # A prompt is read once if the batch holds all of its samples.
        per_prompt = num_samples if len(problems) % num_samples == 0 else 1
        if len(set(problems)) == 1:
            per_prompt = len(problems)
        return GenerateLoop(
            pair,
            [self.prompts[problem] for problem in problems[::per_prompt]],
            SpecConfig(method.draft_len, method.acceptance, record_drafts=is_traced),
            sampling=self.config.sampling.params(),
            max_new_tokens=self.config.max_new_tokens,
            num_samples=per_prompt,
            seeds=[row_seed(batch.seed, row) for row in batch.rows],
            stop_strings=self.stop_strings,
            fixed_batch=True,
            step=method.step,
            policy=None if method.policy is None else find_policy(method.policy, **profile),
        )

    def _sample(self, batch: PlannedBatch, index: int, output: RequestOutput | None, end: float) -> Record:
        row = batch.rows[index]
        tokens = [] if output is None else output.tokens.tolist()
        reason = None if output is None else output.finish_reason
        return {
            **_place(batch),
            "problem": self.problems[row.problem].id,
            "sample": row.sample,
            "row_seed": row_seed(batch.seed, row),
            "text": "" if output is None else output.text or "",
            "tokens": tokens,
            "num_tokens": len(tokens),
            "finish_reason": reason or OVER_BUDGET,
            "mean_logprob": round(float(output.logprobs.mean()), 6) if output is not None and tokens else None,
            "seconds": round(end, 6),
        }

    def _measures(self, batch: PlannedBatch, pair: Pair, loop: GenerateLoop) -> Record:
        categories = {self.problems[row.problem].category for row in batch.rows}
        record: Record = {
            "category": categories.pop() if len(categories) == 1 else "",
            "prefill": round(loop.prefill_seconds, 6),
            "decode": round(sum(loop.step_seconds), 6),
            "compile": round(loop.compile_seconds, 3),
        }
        if not loop.infos:
            return record
        utilization = measure_utilization(
            loop.infos,
            sum(loop.step_seconds),
            loop.prompt_lengths,
            self.device,
            pass_shape(require_model(pair.target, "an experiment").config),
            None if batch.variant.method.step == "decode" else draft_pass_shape(pair.drafter),
        )
        return record | {
            "metrics": finite(dataclasses.asdict(summarize(loop.infos))),
            "latency": finite(dataclasses.asdict(per_token_latency(loop.infos, loop.step_seconds))),
            "utilization": dataclasses.asdict(utilization),
        }


def _place(batch: PlannedBatch) -> Record:
    return {"variant": batch.variant.label, "seed": batch.seed, "repeat": batch.repeat, "group": batch.group}


def _begin_trace(path: Path, loop: GenerateLoop) -> TraceWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    writer = TraceWriter(path)
    begin_trace(writer, loop)
    return writer
