"""The results of a run: measures, scores and tests of each variant, over seeds and repeats."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.experiments.decode import OVER_BUDGET
from bass_jax.experiments.experiment_config import Variant
from bass_jax.experiments.pass_at_k import Answers, answers_of, mean_pass_at_k, pass_all, pass_first
from bass_jax.experiments.permutation_test import TwoSampleTest, permutation_test
from bass_jax.experiments.run_directory import Record, RunRecords, sample_key
from bass_jax.experiments.speed import mean_acceptance_by_position, measure_speed
from bass_jax.experiments.tasks import find_task
from bass_jax.runtime.statistics import Spread, spread_of_rounds


class VariantResult(NamedTuple):
    """The results of one variant.

    The measures are ``ptl_first``, ``ptl_last``, ``ptl_all`` (seconds), ``tokens_per_second``, ``tokens_per_pass``,
    ``acceptance``, ``useful``, ``verified``, ``verified_and_draft`` (shares of the peak), and with a baseline
    ``speed_up`` (ratio of PTL all) and ``throughput_ratio``.
    """

    variant: Variant
    num_problems: int  # answered
    num_samples: int  # over all rounds
    num_rounds: int  # seeds times repeats
    measures: dict[str, Spread]
    acceptance_by_position: tuple[float, ...]  # over all rounds
    scores: dict[str, Spread]  # pass@k, pass@first, pass@all, or the means of the task's measure
    answers: Mapping[tuple[int, int], Answers]  # per round; empty without scores
    categories: dict[str, dict[str, Spread]]  # category → measures, for data with categories


class RunResult(NamedTuple):
    """The results of a run."""

    run: RunRecords
    variants: dict[str, VariantResult]  # by label, in the order of the configuration
    num_identical: dict[str, tuple[int, int]]  # greedy: label → (samples with the baseline's tokens, samples compared)
    same_distribution: dict[str, dict[str, TwoSampleTest]]  # sampled: label → measure → test against the baseline


class Column(NamedTuple):
    """A measure in a table."""

    title: str
    measure: str
    spec: str
    scale: float = 1.0


LATENCY = (
    Column("PTL first, ms", "ptl_first", ".1f", 1e3),
    Column("PTL last, ms", "ptl_last", ".1f", 1e3),
    Column("PTL all, ms", "ptl_all", ".1f", 1e3),
    Column("speed-up", "speed_up", ".2f"),
)
THROUGHPUT = (
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("relative to regular decoding", "throughput_ratio", ".2f"),
    Column("tokens per target pass", "tokens_per_pass", ".2f"),
    Column("acceptance, %", "acceptance", ".1f", 100.0),
)
UTILIZATION = (
    Column("emitted tokens (MFU), %", "useful", ".2f", 100.0),
    Column("verified positions, %", "verified", ".2f", 100.0),
    Column("verified and drafted, %", "verified_and_draft", ".2f", 100.0),
)


def analyze(run: RunRecords) -> RunResult:
    """Computes the results of a run."""
    config = run.config
    task = find_task(config.task.name)
    answers = answers_of(run, task.measure) if run.scores else {}
    batches = {
        variant.label: [batch for batch in run.batches if batch["variant"] == variant.label and "metrics" in batch]
        for variant in config.variants()
    }
    variants: dict[str, VariantResult] = {}
    num_identical, same_distribution = {}, {}
    for variant in config.variants():
        label, baseline = variant.label, config.baseline_of(variant)
        if not batches[label]:
            continue
        if baseline == label:
            baseline = None
        base = batches[baseline] if baseline is not None else []
        samples = [sample for sample in run.samples if sample["variant"] == label]
        rounds = {key: found for key, found in answers.get(label, {}).items() if found}
        variants[label] = VariantResult(
            variant=variant,
            num_problems=len({sample["problem"] for sample in samples}),
            num_samples=len(samples),
            num_rounds=len({(batch["seed"], batch["repeat"]) for batch in batches[label]}),
            measures=measure_speed(batches[label], base),
            acceptance_by_position=mean_acceptance_by_position(batches[label]),
            scores=_scores(rounds, task.measure, is_program=task.program is not None),
            answers=rounds,
            categories=_categories(batches[label], base),
        )
        # A lossy rule or another target has another distribution by design.
        is_comparable = find_rule(variant.method.acceptance).lossless and variant.method.quantize is None
        if baseline is None or not base or not is_comparable:
            continue
        if config.sampling.temperature == 0:
            num_identical[label] = count_identical(run.samples, label, run.samples, baseline)
        elif tests := compare_distributions(run, label, run, baseline):
            same_distribution[label] = tests
    return RunResult(run, variants, num_identical, same_distribution)


def count_identical(
    first: Sequence[Record], first_label: str, second: Sequence[Record], second_label: str
) -> tuple[int, int]:
    """Returns how many samples have the same tokens under both labels, and how many exist under both."""

    def tokens(samples: Sequence[Record], label: str) -> dict[tuple, list[int]]:
        return {
            sample_key(sample)[1:]: sample["tokens"]
            for sample in samples
            if sample["variant"] == label and sample["finish_reason"] != OVER_BUDGET
        }

    one, other = tokens(first, first_label), tokens(second, second_label)
    both = one.keys() & other.keys()
    return sum(one[key] == other[key] for key in both), len(both)


def compare_distributions(
    first: RunRecords, first_label: str, second: RunRecords, second_label: str
) -> dict[str, TwoSampleTest]:
    """Tests whether length, mean log-probability and score of two sets of samples have the same distributions.

    Only the first repeat counts, because repeats decode the same samples. Under a time budget nothing is tested: long
    answers are missing there, and more of them for a slower method.
    """
    if first.config.budget is not None or second.config.budget is not None:
        return {}
    measure = find_task(first.config.task.name).measure

    def score(run: RunRecords) -> Callable[[Record], float | None]:
        return lambda sample: (run.scores.get(sample_key(sample)) or {"scores": {}})["scores"].get(measure)

    def values(run: RunRecords, label: str, of: Callable[[Record], float | None]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for sample in run.samples:
            if sample["variant"] == label and sample["repeat"] == 0 and sample["finish_reason"] != OVER_BUDGET:
                value = of(sample)
                if value is not None:
                    found.setdefault(sample["problem"], []).append(float(value))
        return found

    num_tokens, mean_logprob = operator.itemgetter("num_tokens"), operator.itemgetter("mean_logprob")
    tests = {}
    for name, of_first, of_second in (
        ("num_tokens", num_tokens, num_tokens),
        ("mean_logprob", mean_logprob, mean_logprob),
        (measure, score(first), score(second)),
    ):
        one, other = values(first, first_label, of_first), values(second, second_label, of_second)
        if one.keys() & other.keys():
            tests[name] = permutation_test(one, other)
    return tests


def _categories(batches: Sequence[Record], baseline: Sequence[Record]) -> dict[str, dict[str, Spread]]:
    """Returns the measures per category, over batches that hold one category only."""

    def of(name: str, records: Sequence[Record]) -> list[Record]:
        return [batch for batch in records if batch["category"] == name]

    names = dict.fromkeys(batch["category"] for batch in batches if batch["category"])
    return {name: measure_speed(of(name, batches), of(name, baseline)) for name in names}


def _scores(rounds: Mapping[tuple[int, int], Answers], measure: str, *, is_program: bool) -> dict[str, Spread]:
    num_samples = min((len(rows) for answers in rounds.values() for rows in answers.values()), default=0)
    named: dict[str, Callable[[Answers], float]] = {}
    if is_program:
        for k in (1, 2, 4, 8, 16, 32, 64):
            if k <= num_samples:
                named[f"pass@{k}"] = lambda answers, k=k: mean_pass_at_k(answers, k)
    else:
        named[measure] = lambda answers: float(np.mean([row.value for rows in answers.values() for row in rows]))
    if num_samples > 1:
        first, best = ("pass@first", "pass@all") if is_program else (f"{measure}, first", f"{measure}, best")
        named |= {first: pass_first, best: pass_all}

    def of_rows(rows: Sequence[Sequence], of: Callable[[Answers], float]) -> float:
        return of({str(index): answers for index, answers in enumerate(rows)})

    samples = [(list(answers.values()),) for answers in rounds.values()]
    found = {name: spread_of_rounds(lambda rows, of=of: of_rows(rows, of), samples) for name, of in named.items()}
    return {name: spread for name, spread in found.items() if spread is not None}
