"""Decodes one batch of a run, against the clock of its group."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.analysis.utilization import measure_utilization
from bass_jax.config import SpecConfig
from bass_jax.cost_model import Device, PassShape, pass_shape
from bass_jax.decoding.metrics import per_token_latency, summarize
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.traces import TraceWriter
from bass_jax.drafters import EagleDrafter, ModelDrafter
from bass_jax.engine.generate import GenerateLoop, begin_trace
from bass_jax.experiments.experiment_config import ExperimentConfig
from bass_jax.experiments.plan import Batch, row_seed
from bass_jax.experiments.run_directory import Record
from bass_jax.experiments.tasks import Problem
from bass_jax.policies import Policy, find_policy

OVER_BUDGET = "budget"
"""Why a row ended that the time budget stopped."""

_WARM_STEPS = 2


@dataclasses.dataclass(frozen=True)
class BatchDecoder:
    """Everything that the batches of a run have in common.

    Attributes:
        config: of the experiment.
        problems: all of them.
        prompts: token ids of each.
        stop_strings: that end an answer.
        device: its peak, for the utilization.
    """

    config: ExperimentConfig
    problems: Sequence[Problem]
    prompts: Sequence[np.ndarray]
    stop_strings: Sequence[str]
    device: Device

    def decode(self, batch: Batch, pair: Pair, start: float, trace: Path | None = None) -> tuple[Record, list[Record]]:
        """Decodes a batch to its end, or to the end of the group's time.

        The clock counts prefill and steps, and no compilation. A batch whose executables were made just now is begun
        again, so that nothing that happens but once is in its time.

        Args:
            batch: what to decode.
            pair: with what.
            start: seconds on the group's clock.
            trace: file to record it in.

        Returns:
            The record of the batch and those of its samples.
        """
        budget = math.inf if self.config.budget is None else self.config.budget
        if start >= budget:
            return self._skipped(batch, start), [
                self._sample(batch, index, None, start) for index in range(len(batch.rows))
            ]
        run = self._run(batch, pair)
        if run.compile_seconds:
            for _, _ in zip(range(_WARM_STEPS), run, strict=False):
                pass
            run = self._run(batch, pair)
        elapsed = start + run.prefill_seconds
        ends = [0.0] * len(batch.rows)
        writer = None if trace is None else _begin(trace, run)
        for info in run:
            elapsed += run.step_seconds[-1]
            if writer is not None:
                writer.step(info, run.step_seconds[-1], run.num_rows)
            for event in run.events:
                ends[event.row] = elapsed
            if elapsed >= budget:
                break
        if writer is not None:
            writer.end()
            writer.close()
        samples = [self._sample(batch, index, run, ends[index]) for index in range(len(batch.rows))]
        return self._batch(batch, pair, run, start, elapsed), samples

    def _run(self, batch: Batch, pair: Pair) -> GenerateLoop:
        method, num_samples = batch.variant.method, batch.variant.num_samples
        config = self.config
        spec = SpecConfig(
            method.draft_len, method.acceptance, record_drafts=config.trace and method.step == "speculate"
        )
        problems = [row.problem for row in batch.rows]
        # Where all samples of each problem are here, its prompt is read once.
        per_prompt = num_samples if len(batch.rows) % num_samples == 0 else 1
        if per_prompt == 1 and len(set(problems)) == 1:
            per_prompt = len(batch.rows)
        return GenerateLoop(
            pair, [self.prompts[problem] for problem in problems[::per_prompt]], spec,
            sampling=config.sampling.sampling(), max_new_tokens=config.max_new_tokens, num_samples=per_prompt,
            seeds=[row_seed(batch.seed, row) for row in batch.rows], stop_strings=self.stop_strings,
            fixed_batch=True, step=method.step, policy=_policy(method.policy, method.profile),
        )  # fmt: skip

    def _sample(self, batch: Batch, index: int, run: GenerateLoop | None, end: float) -> Record:
        row = batch.rows[index]
        found = None if run is None else run.row(index)
        tokens = [] if found is None else found.tokens.tolist()
        reason = None if found is None else found.finish_reason
        return {
            **_place(batch),
            "problem": self.problems[row.problem].id,
            "sample": row.sample,
            "row_seed": row_seed(batch.seed, row),
            "text": "" if found is None or found.text is None else found.text,
            "tokens": tokens,
            "num_tokens": len(tokens),
            "finish_reason": reason or OVER_BUDGET,
            "mean_logprob": round(float(found.logprobs.mean()), 6) if found is not None and tokens else None,
            "seconds": round(end, 6),
        }

    def _skipped(self, batch: Batch, start: float) -> Record:
        return {**_place(batch), "part": batch.part, "start": start, "end": start, "num_rows": len(batch.rows)}

    def _batch(self, batch: Batch, pair: Pair, run: GenerateLoop, start: float, end: float) -> Record:
        categories = {self.problems[row.problem].category for row in batch.rows}
        record: Record = {
            **_place(batch),
            "part": batch.part,
            "num_rows": run.num_rows,
            "category": categories.pop() if len(categories) == 1 else "",
            "start": round(start, 6),
            "end": round(end, 6),
            "prefill": round(run.prefill_seconds, 6),
            "decode": round(sum(run.step_seconds), 6),
            "compile": round(run.compile_seconds, 3),
        }
        if not run.infos:
            return record
        summary = dataclasses.asdict(summarize(run.infos))
        latency = dataclasses.asdict(per_token_latency(run.infos, run.step_seconds))
        use = measure_utilization(
            run.infos, sum(run.step_seconds), run.prompt_lengths, self.device, pass_shape(pair.target.config),
            _draft_shape(pair, batch),
        )  # fmt: skip
        record["summary"] = {name: _finite(value) for name, value in summary.items()}
        record["latency"] = {name: _finite(value) for name, value in latency.items()}
        record["utilisation"] = dataclasses.asdict(use)
        return record


def _place(batch: Batch) -> Record:
    return {"variant": batch.variant.label, "seed": batch.seed, "repeat": batch.repeat, "group": batch.group}


def _policy(name: str | None, profile: str | None) -> Policy | None:
    if name is None:
        return None
    return find_policy(name, **({} if profile is None else {"profile": profile}))


def _draft_shape(pair: Pair, batch: Batch) -> PassShape | None:
    drafter = pair.drafter
    if not isinstance(drafter, ModelDrafter | EagleDrafter) or batch.variant.method.step == "decode":
        return None
    return pass_shape(drafter.model.config)


def _begin(path: Path, run: GenerateLoop) -> TraceWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    writer = TraceWriter(path)
    begin_trace(writer, run)
    return writer


def _finite(value: Any) -> Any:
    """JSON has no NaN: what does not exist is None."""
    if isinstance(value, tuple | list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
