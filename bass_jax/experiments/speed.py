"""Latency, throughput, acceptance and utilization, from the records of batches."""

from collections.abc import Callable, Sequence

import numpy as np

from bass_jax.experiments.run_directory import Record
from bass_jax.runtime.statistics import Spread, spread_of_rounds


def measure_speed(batches: Sequence[Record], baseline: Sequence[Record]) -> dict[str, Spread]:
    """Returns the measures of one variant, by name.

    Args:
        batches: of the variant.
        baseline: of the baseline; may be empty.
    """
    rounds, baseline_rounds = _by(batches, "seed", "repeat"), _by(baseline, "seed", "repeat")
    groups = [(list(_by(rows, "group").values()),) for rows in rounds.values()]
    found = {
        name: spread_of_rounds(
            lambda groups, measure=measure: measure([row for rows in groups for row in rows]), groups
        )
        for name, measure in _MEASURES.items()
    }
    both = [(rounds[key], baseline_rounds[key]) for key in rounds if key in baseline_rounds]
    latency = _mean_latency("all")
    found["speed_up"] = spread_of_rounds(lambda one, base: _divide(latency(base), latency(one)), both)
    found["throughput_ratio"] = spread_of_rounds(
        lambda one, base: _divide(_tokens_per_second(one), _tokens_per_second(base)), both
    )
    return {name: spread for name, spread in found.items() if spread is not None}


def mean_acceptance_by_position(batches: Sequence[Record]) -> tuple[float, ...]:
    """Returns the acceptance by position over all batches, given that the drafts before were accepted."""
    length = max(len(batch["metrics"]["num_reached_by_position"]) for batch in batches)
    num_reached, num_accepted = np.zeros(length), np.zeros(length)
    for batch in batches:
        counts = np.asarray(batch["metrics"]["num_reached_by_position"], float)
        rates = np.asarray([rate or 0.0 for rate in batch["metrics"]["acceptance_by_position"]])
        num_reached[: len(counts)] += counts
        num_accepted[: len(counts)] += counts * rates
    return tuple((num_accepted[num_reached > 0] / num_reached[num_reached > 0]).tolist())


def _by(batches: Sequence[Record], *names: str) -> dict[tuple, list[Record]]:
    found: dict[tuple, list[Record]] = {}
    for batch in batches:
        found.setdefault(tuple(batch[name] for name in names), []).append(batch)
    return found


def _divide(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _sum(batches: Sequence[Record], name: str) -> float:
    return float(sum(batch["metrics"][name] for batch in batches))


def _tokens_per_second(batches: Sequence[Record]) -> float:
    return _sum(batches, "num_emitted") / sum(batch["decode"] for batch in batches)


def _mean_latency(name: str) -> Callable[[Sequence[Record]], float | None]:
    def measure(batches: Sequence[Record]) -> float | None:
        values = [batch["latency"][name] for batch in batches if batch["latency"][name] is not None]
        return float(np.mean(values)) if values else None

    return measure


def _utilization(name: str) -> Callable[[Sequence[Record]], float]:
    def measure(batches: Sequence[Record]) -> float:
        seconds = [batch["decode"] for batch in batches]
        return float(np.average([batch["utilization"][name] for batch in batches], weights=seconds))

    return measure


_MEASURES: dict[str, Callable[[Sequence[Record]], float | None]] = {
    "ptl_first": _mean_latency("first"),
    "ptl_last": _mean_latency("last"),
    "ptl_all": _mean_latency("all"),
    "tokens_per_second": _tokens_per_second,
    "tokens_per_pass": lambda batches: _sum(batches, "num_emitted") / _sum(batches, "num_row_steps"),
    "acceptance": lambda batches: _divide(_sum(batches, "num_accepted"), _sum(batches, "num_drafted")),
    "useful": _utilization("useful"),
    "verified": _utilization("verified"),
    "verified_and_draft": _utilization("verified_and_draft"),
}
