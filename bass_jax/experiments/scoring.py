"""Scores the samples of a run: by comparing texts, or by running code if the user allows it."""

from collections.abc import Callable
from pathlib import Path

from bass_jax.experiments.decode import OVER_BUDGET
from bass_jax.experiments.problems import load_problems
from bass_jax.experiments.run_directory import SCORES, Record, append_records, open_records, read_run, sample_key
from bass_jax.experiments.sandbox import ProgramResult, SandboxLimits, run_programs


class PermissionNeededError(ValueError):
    """The task's answers are programs, and running them was not allowed."""


def score_run(
    directory: str | Path,
    *,
    allow_code_execution: bool = False,
    inside_container: bool = False,
    limits: SandboxLimits | None = None,
    on_progress: Callable[[int, int], None] = lambda num_done, num_samples: None,
) -> int:
    """Scores the samples that have no score yet, and appends the scores to the run directory.

    Samples that the time budget cut off get no score. A program that several samples led to runs once.

    Args:
        directory: of the run.
        allow_code_execution: run programs that the model wrote, in a sandbox; see `bass_jax.experiments.sandbox`.
        inside_container: see `bass_jax.experiments.sandbox.run_program`.
        limits: of each program.
        on_progress: called after each sample with the number of scored samples and of all samples.

    Returns:
        The number of samples that have a score now.

    Raises:
        PermissionNeededError: if the answers are programs and running them is not allowed; the samples are kept.
        ValueError: if this machine cannot isolate programs, or a library is missing.
    """
    records = read_run(directory)
    task, problems = load_problems(records.config.task)
    if not task.is_scored:
        return 0
    by_id = {problem.id: problem for problem in problems}
    done: set[tuple] = set()
    with open_records(records.path / SCORES, lambda score: done.add(sample_key(score))) as file:
        finished = [sample for sample in records.samples if sample["finish_reason"] != OVER_BUDGET]
        samples = [sample for sample in finished if sample_key(sample) not in done]
        total = len(done) + len(samples)
        if not samples:
            return total
        if task.program is not None and not allow_code_execution:
            raise PermissionNeededError(
                f"{records.path}: {len(samples)} samples are kept without scores, because scoring runs programs that "
                "the model wrote; allow it with --allow-code-execution"
            )

        def append(sample: Record, **entries) -> None:
            key = {name: sample[name] for name in ("variant", "seed", "repeat", "problem", "sample")}
            append_records(file, key | entries)
            done.add(sample_key(sample))
            on_progress(len(done), total)

        if task.program is None:
            assert task.score is not None
            for sample in samples:
                append(sample, scores=dict(task.score(by_id[sample["problem"]], sample["text"])))
            return total
        by_program: dict[str, list[Record]] = {}
        for sample in samples:
            by_program.setdefault(task.program(by_id[sample["problem"]], sample["text"]), []).append(sample)
        programs = list(by_program)

        def on_result(index: int, result: ProgramResult) -> None:
            for sample in by_program[programs[index]]:
                append(sample, scores={"passed": float(result.passed)}, reason=result.reason)

        run_programs(programs, limits, inside_container=inside_container, on_result=on_result)
        return total
