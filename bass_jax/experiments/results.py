"""What a run came to: per way of decoding, over seeds and repeats."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.experiments.decode import OVER_BUDGET
from bass_jax.experiments.experiment_config import Variant
from bass_jax.experiments.pass_at_k import Answers, answers_of, mean_pass_at_k, pass_all, pass_first
from bass_jax.experiments.permutation_test import TwoSampleTest, permutation_test
from bass_jax.experiments.run_directory import Record, RunRecords, sample_key
from bass_jax.experiments.speed import acceptance_by_position, measure_speed
from bass_jax.experiments.tasks import find_task
from bass_jax.runtime.statistics import Spread, bootstrap


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """One way of decoding.

    Attributes:
        variant: which.
        num_problems: that it has answered.
        num_samples: answers, over all rounds.
        num_rounds: seeds times repeats.
        measures: name to figure: ``ptl_first``, ``ptl_last``, ``ptl_all`` (seconds), ``tokens_per_second``,
            ``block_efficiency``, ``acceptance``, ``useful``, ``verified``, ``verified_and_draft`` (shares of the peak),
            and, with a baseline, ``speed_up`` (ratio of PTL all) and ``throughput_ratio``.
        acceptance_by_position: over all rounds.
        scores: name to figure: ``pass@k``, ``pass@first``, ``pass@all``, or the means of the task's measure.
        answers: per round; empty without scores.
        categories: category to measures, for data that has some.
    """

    variant: Variant
    num_problems: int
    num_samples: int
    num_rounds: int
    measures: dict[str, Spread]
    acceptance_by_position: tuple[float, ...]
    scores: dict[str, Spread]
    answers: Mapping[tuple[int, int], Answers]
    categories: dict[str, dict[str, Spread]]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """All ways of a run.

    Attributes:
        run: its records.
        variants: by label, in the configuration's order.
        num_identical: of a greedy run: label to (samples that are token for token the baseline's, samples compared).
        same_distribution: of a sampled run: label to measure to the test against the baseline.
    """

    run: RunRecords
    variants: dict[str, VariantResult]
    num_identical: dict[str, tuple[int, int]]
    same_distribution: dict[str, dict[str, TwoSampleTest]]


def analyse(run: RunRecords) -> RunResult:
    """Adds a run up."""
    config = run.config
    task = find_task(config.task.name)
    answers = answers_of(run, task.measure) if run.scores else {}
    by_label = {
        variant.label: [batch for batch in run.batches if batch["variant"] == variant.label and "summary" in batch]
        for variant in config.variants()
    }
    variants = {}
    for variant in config.variants():
        batches = by_label[variant.label]
        if not batches:
            continue
        label = config.baseline_of(variant)
        measures = measure_speed(batches, by_label[label] if label is not None and label != variant.label else [])
        samples = [sample for sample in run.samples if sample["variant"] == variant.label]
        rounds = {key: found for key, found in answers.get(variant.label, {}).items() if found}
        variants[variant.label] = VariantResult(
            variant=variant,
            num_problems=len({sample["problem"] for sample in samples}),
            num_samples=len(samples),
            num_rounds=len({(batch["seed"], batch["repeat"]) for batch in batches}),
            measures=measures,
            acceptance_by_position=acceptance_by_position(batches),
            scores=_scores(rounds, task.measure, is_program=task.program is not None),
            answers=rounds,
            categories=_categories(batches, by_label[label] if label is not None and label != variant.label else []),
        )
    is_greedy = config.sampling.temperature == 0
    identical, same_distribution = {}, {}
    for variant in config.variants():
        label = config.baseline_of(variant)
        if label is None or label == variant.label or not {label, variant.label} <= variants.keys():
            continue
        # A rule that is lossy, or another target, has another distribution by design.
        is_comparable = find_rule(variant.method.acceptance).lossless and variant.method.quantize is None
        if not is_comparable:
            continue
        if is_greedy:
            identical[variant.label] = count_identical(run.samples, variant.label, run.samples, label)
        else:
            same_distribution[variant.label] = compare_distributions(run, variant.label, run, label)
    same_distribution = {label: tests for label, tests in same_distribution.items() if tests}
    return RunResult(run, variants, identical, same_distribution)


def count_identical(
    first: Sequence[Record], first_label: str, second: Sequence[Record], second_label: str
) -> tuple[int, int]:
    """Returns how many samples have the same tokens under both labels, and how many both have."""

    def tokens(samples: Sequence[Record], label: str) -> dict[tuple, list[int]]:
        return {
            (sample["seed"], sample["repeat"], sample["problem"], sample["sample"]): sample["tokens"]
            for sample in samples
            if sample["variant"] == label and sample["finish_reason"] != OVER_BUDGET
        }

    one, other = tokens(first, first_label), tokens(second, second_label)
    both = one.keys() & other.keys()
    return sum(one[key] == other[key] for key in both), len(both)


def compare_distributions(
    first: RunRecords, first_label: str, second: RunRecords, second_label: str
) -> dict[str, TwoSampleTest]:
    """Tests whether two sets of samples have the same distribution: their length, their mean log-probability and
    their score.

    Repeats draw the same samples again and count once. Under a time budget nothing is tested: the long answers are
    missing then, the more the slower a way is.
    """
    if first.config.budget is not None or second.config.budget is not None:
        return {}
    measure = find_task(first.config.task.name).measure

    def values(run: RunRecords, label: str, of: Callable[[Record], float | None]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for sample in run.samples:
            if sample["variant"] == label and sample["repeat"] == 0 and sample["finish_reason"] != OVER_BUDGET:
                value = of(sample)
                if value is not None:
                    found.setdefault(sample["problem"], []).append(float(value))
        return found

    def score(run: RunRecords) -> Callable[[Record], float | None]:
        return lambda sample: (run.scores.get(sample_key(sample)) or {"scores": {}})["scores"].get(measure)

    measures: dict[str, tuple[Callable, Callable]] = {
        "num_tokens": (operator.itemgetter("num_tokens"), operator.itemgetter("num_tokens")),
        "mean_logprob": (operator.itemgetter("mean_logprob"), operator.itemgetter("mean_logprob")),
        measure: (score(first), score(second)),
    }
    tests = {}
    for name, (of_first, of_second) in measures.items():
        one, other = values(first, first_label, of_first), values(second, second_label, of_second)
        if one.keys() & other.keys():
            tests[name] = permutation_test(one, other)
    return tests


def _categories(batches: Sequence[Record], baseline: Sequence[Record]) -> dict[str, dict[str, Spread]]:
    """The speed per category, over batches of one category alone."""

    def of(name: str, records: Sequence[Record]) -> list[Record]:
        return [batch for batch in records if batch["category"] == name]

    names = dict.fromkeys(batch["category"] for batch in batches if batch["category"])
    return {name: measure_speed(of(name, batches), of(name, baseline)) for name in names}


def _scores(rounds: Mapping[tuple[int, int], Answers], measure: str, *, is_program: bool) -> dict[str, Spread]:
    if not rounds:
        return {}
    named: dict[str, Callable[[Answers], float]] = {}
    num_samples = min(len(rows) for answers in rounds.values() for rows in answers.values())
    if is_program:
        for k in (1, 2, 4, 8, 16, 32, 64):
            if k <= num_samples:
                named[f"pass@{k}"] = lambda answers, k=k: mean_pass_at_k(answers, k)
        if num_samples > 1:
            named |= {"pass@first": pass_first, "pass@all": pass_all}
    else:
        named[measure] = lambda answers: float(np.mean([row.value for rows in answers.values() for row in rows]))
        if num_samples > 1:
            named |= {f"{measure}, first": pass_first, f"{measure}, best": pass_all}
    return {name: _score_spread(rounds, of) for name, of in named.items()}


def _score_spread(rounds: Mapping[tuple[int, int], Answers], of: Callable[[Answers], float]) -> Spread:
    values = [of(answers) for answers in rounds.values()]
    if len(values) > 1:
        return Spread(float(np.median(values)), min(values), max(values))
    rows = list(next(iter(rounds.values())).values())
    return bootstrap(values[0], rows, lambda picked: of({str(index): one for index, one in enumerate(picked)}))
