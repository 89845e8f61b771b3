"""Scores the samples of a run: by comparing texts, or, where a user allows it, by running code."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bass_jax.experiments.decode import OVER_BUDGET
from bass_jax.experiments.problems import load_problems
from bass_jax.experiments.run_directory import ScoreFile, read_run, sample_key
from bass_jax.experiments.sandbox import ProgramResult, SandboxLimits, check_sandbox, run_programs


class ScoreProgress(NamedTuple):
    """How far scoring is."""

    num_done: int
    num_samples: int


class PermissionNeededError(ValueError):
    """The task's answers are programs, and nobody has allowed to run them."""


def score_run(
    directory: str | Path,
    *,
    allow_code_execution: bool = False,
    limits: SandboxLimits | None = None,
    on_progress: Callable[[ScoreProgress], None] = lambda progress: None,
) -> int:
    """Scores what has no score yet, and appends it to the run directory.

    Samples that a time budget cut off have none. A program that several samples came to is run once.

    Args:
        directory: of the run.
        allow_code_execution: programs that the model wrote may be run, in a sandbox; see
            `bass_jax.experiments.sandbox`.
        limits: of each program.
        on_progress: called after each sample.

    Returns:
        How many samples have a score now.

    Raises:
        PermissionNeededError: if the answers are programs and running them is not allowed; the samples are kept.
        ValueError: if this machine cannot isolate programs, or a library is missing.
    """
    records = read_run(directory)
    task, problems = load_problems(records.config.task)
    if not task.is_scored:
        return 0
    by_id = {problem.id: problem for problem in problems}
    with ScoreFile(records.path) as scores:
        samples = [
            sample for sample in records.samples
            if sample_key(sample) not in scores.done and sample["finish_reason"] != OVER_BUDGET
        ]  # fmt: skip
        total = len(scores.done) + len(samples)
        if not samples:
            return total
        if task.program is not None and not allow_code_execution:
            raise PermissionNeededError(
                f"{records.path}: {len(samples)} samples are kept and not scored: that runs programs which the model "
                "wrote; allow it with --allow-code-execution"
            )

        def note(sample, values, reason=None):
            key = {name: sample[name] for name in ("variant", "seed", "repeat", "problem", "sample")}
            scores.append({**key, "scores": values} | ({} if reason is None else {"reason": reason}))
            on_progress(ScoreProgress(len(scores.done), total))

        if task.program is None:
            assert task.score is not None
            for sample in samples:
                note(sample, dict(task.score(by_id[sample["problem"]], sample["text"])))
            return total
        check_sandbox()
        same: dict[str, list] = {}
        for sample in samples:
            same.setdefault(task.program(by_id[sample["problem"]], sample["text"]), []).append(sample)
        programs = list(same)

        def on_result(index: int, result: ProgramResult) -> None:
            for sample in same[programs[index]]:
                note(sample, {"passed": float(result.passed)}, result.reason)

        run_programs(programs, limits, on_result=on_result)
        return total
