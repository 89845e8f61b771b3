"""Two runs side by side: where they are the same, and what is faster."""

from pathlib import Path
from typing import NamedTuple

from bass_jax.experiments.permutation_test import TwoSampleTest
from bass_jax.experiments.results import RunResult, analyse, compare_distributions, count_identical
from bass_jax.experiments.run_directory import RunRecords, read_run
from bass_jax.runtime.yaml_config import as_plain


class VariantComparison(NamedTuple):
    """One label of the first run against one of the second."""

    first: str
    second: str
    latency_ratio: float | None  # PTL all of the first over the second's: above 1, the second is faster
    throughput_ratio: float | None  # tokens/s of the second over the first's
    num_identical: tuple[int, int]  # samples with the same tokens, samples compared
    tests: dict[str, TwoSampleTest]


class Comparison(NamedTuple):
    """Two runs."""

    differences: dict[str, tuple[object, object]]  # keys of the configuration, dotted
    variants: list[VariantComparison]


def compare_runs(first: str | Path, second: str | Path) -> Comparison:
    """Compares variants of the same label; if none is shared, every one of the first with every one of the second.

    Raises:
        ValueError: if a directory is no run, or the runs have other tasks.
    """
    one, other = analyse(read_run(first)), analyse(read_run(second))
    tasks = one.run.config.task.name, other.run.config.task.name
    if tasks[0] != tasks[1]:
        raise ValueError(f"{first} ran the task {tasks[0]!r} and {second} {tasks[1]!r}: expected the same")
    shared = [(label, label) for label in one.variants if label in other.variants]
    pairs = shared or [(label, another) for label in one.variants for another in other.variants]
    return Comparison(_differences(one.run, other.run), [_compare(one, other, *labels) for labels in pairs])


def _compare(one: RunResult, other: RunResult, first: str, second: str) -> VariantComparison:
    here, there = one.variants[first].measures, other.variants[second].measures

    def ratio(above, below, name: str) -> float | None:
        return above[name].value / below[name].value if name in above and name in below else None

    return VariantComparison(
        first,
        second,
        ratio(here, there, "ptl_all"),
        ratio(there, here, "tokens_per_second"),
        count_identical(one.run.samples, first, other.run.samples, second),
        compare_distributions(one.run, first, other.run, second) if one.run.config.sampling.temperature > 0 else {},
    )


def _differences(one: RunRecords, other: RunRecords) -> dict[str, tuple[object, object]]:
    here, there = _flat(as_plain(one.config)), _flat(as_plain(other.config))
    return {
        name: (here.get(name), there.get(name))
        for name in {**here, **there}
        if here.get(name) != there.get(name) and name not in ("output_dir", "title")
    }


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: leaf
        for key, item in value.items()
        for name, leaf in _flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }
