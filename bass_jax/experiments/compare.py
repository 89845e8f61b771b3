"""Compares two runs: their configurations, speeds and samples."""

from pathlib import Path
from typing import Any, NamedTuple

from bass_jax.experiments.permutation_test import TwoSampleTest
from bass_jax.experiments.results import RunResult, analyze, compare_distributions, count_identical
from bass_jax.experiments.run_directory import config_differences, read_run


class VariantComparison(NamedTuple):
    """A variant of the first run and one of the second."""

    label: str
    latency_ratio: float | None  # PTL all, first over second: the second is faster if above 1
    throughput_ratio: float  # tokens/s, second over first
    num_identical: tuple[int, int]  # samples with the same tokens, samples compared
    tests: dict[str, TwoSampleTest]


def compare_runs(first: str | Path, second: str | Path) -> tuple[dict[str, tuple[Any, Any]], list[VariantComparison]]:
    """Compares variants with the same label; if there are none, every variant of one run with every one of the other.

    Returns:
        The differences of the configurations, dotted key → both values, and the comparisons.

    Raises:
        ValueError: if a directory is not a run directory, or the runs have different tasks.
    """
    one, other = analyze(read_run(first)), analyze(read_run(second))
    tasks = one.run.config.task.name, other.run.config.task.name
    if tasks[0] != tasks[1]:
        raise ValueError(f"{first} ran the task {tasks[0]!r} and {second} {tasks[1]!r}: expected the same")
    shared = [(label, label) for label in one.variants if label in other.variants]
    pairs = shared or [(label, another) for label in one.variants for another in other.variants]
    differences = config_differences(one.run.config, other.run.config)
    differences.pop("title", None)
    return differences, [_compare(one, other, *labels) for labels in pairs]


def _compare(one: RunResult, other: RunResult, first: str, second: str) -> VariantComparison:
    here, there = one.variants[first].measures, other.variants[second].measures
    has_latency = "ptl_all" in here and "ptl_all" in there
    return VariantComparison(
        label=first if first == second else f"{second} over {first}",
        latency_ratio=here["ptl_all"].value / there["ptl_all"].value if has_latency else None,
        throughput_ratio=there["tokens_per_second"].value / here["tokens_per_second"].value,
        num_identical=count_identical(one.run.samples, first, other.run.samples, second),
        tests=compare_distributions(one.run, first, other.run, second) if one.run.config.sampling.temperature else {},
    )
