"""Pass@k, Pass@First and Pass@All, also within a time budget."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.experiments.decode import OVER_BUDGET
from bass_jax.experiments.run_directory import RunRecords, sample_key


class Answer(NamedTuple):
    """A scored sample."""

    value: float  # of the task's measure; 1 or 0 for a program
    mean_logprob: float  # -inf without tokens
    seconds: float  # on the problem's clock when it ended
    is_finished: bool  # False if the time budget cut it off


type Answers = Mapping[str, Sequence[Answer]]
"""Answers per problem, of one variant, seed and repeat."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that one of k samples passes.

    ``1 - C(n - c, k) / C(n, k)`` for c of n samples that passed.

    Raises:
        ValueError: if k exceeds the number of samples.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: expected 1 to num_samples={num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def mean_pass_at_k(answers: Answers, k: int) -> float:
    """Returns the mean of `pass_at_k` over problems."""
    return float(np.mean([pass_at_k(len(rows), round(sum(row.value for row in rows)), k) for rows in answers.values()]))


def pass_first(answers: Answers, budget: float = math.inf) -> float:
    """Returns Pass@First: the mean value of each problem's answer with the highest mean log-probability.

    Only answers that ended within the budget (seconds) count; a problem without any counts 0.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 4.
    """
    values = []
    for rows in answers.values():
        ended = _ended(rows, budget)
        values.append(max(ended, key=lambda row: row.mean_logprob).value if ended else 0.0)
    return float(np.mean(values))


def pass_all(answers: Answers, budget: float = math.inf) -> float:
    """Returns Pass@All: the mean over problems of the best answer that ended within the budget (seconds)."""
    return float(np.mean([max((row.value for row in _ended(rows, budget)), default=0.0) for rows in answers.values()]))


def share_ended(answers: Answers, budget: float = math.inf) -> float:
    """Returns the share of the answers that ended within the budget (seconds)."""
    return float(np.mean([len(_ended(rows, budget)) / len(rows) for rows in answers.values()]))


def budget_grid(many: Iterable[Answers], num_points: int = 200) -> np.ndarray:
    """Returns budgets from 0 to the end of the last answer, ``[num_points]`` seconds."""
    ends = [row.seconds for answers in many for rows in answers.values() for row in rows if row.is_finished]
    return np.linspace(0.0, 1.02 * max(ends, default=1.0), num_points)


def answers_of(run: RunRecords, measure: str) -> dict[str, dict[tuple[int, int], dict[str, list[Answer]]]]:
    """Returns the answers of a run: variant → (seed, repeat) → problem → answers.

    A problem is left out if a sample of it is missing, or has neither a score nor been cut off by the time budget.
    """
    found: dict[str, dict[tuple[int, int], dict[str, list[Answer]]]] = {}
    for sample in run.samples:
        rounds = found.setdefault(sample["variant"], {}).setdefault((sample["seed"], sample["repeat"]), {})
        is_finished, score = sample["finish_reason"] != OVER_BUDGET, run.scores.get(sample_key(sample))
        if is_finished and score is None:
            continue
        value = score["scores"].get(measure, 0.0) if is_finished and score is not None else 0.0
        logprob = -math.inf if sample["mean_logprob"] is None else sample["mean_logprob"]
        rounds.setdefault(sample["problem"], []).append(Answer(value, logprob, sample["seconds"], is_finished))
    for variant in run.config.variants():
        for problems in found.get(variant.label, {}).values():
            for problem in [name for name, rows in problems.items() if len(rows) != variant.num_samples]:
                del problems[problem]
    return found


def _ended(rows: Sequence[Answer], budget: float) -> list[Answer]:
    return [row for row in rows if row.is_finished and row.seconds <= budget]
