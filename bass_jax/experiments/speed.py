"""From batch records to latency, throughput, acceptance and utilization."""

from collections.abc import Callable, Sequence

import numpy as np

from bass_jax.experiments.run_directory import Record
from bass_jax.runtime.statistics import Spread, bootstrap

_NUM_RESAMPLES = 400


def measure_speed(batches: Sequence[Record], baseline: Sequence[Record]) -> dict[str, Spread]:
    """Returns the figures of one way of decoding, by name.

    Args:
        batches: that it decoded.
        baseline: those of regular decoding; may be empty.
    """
    found = {}
    for name, of in _MEASURES.items():
        if all(of(part) is not None for part in _rounds(batches).values()):
            found[name] = _spread(batches, lambda rows, of=of: of(rows))
    if baseline:
        found["speed_up"] = _ratio_spread(baseline, batches, _mean_latency("all"))
        found["throughput_ratio"] = _ratio_spread(batches, baseline, _tokens_per_second)
    return found


def _rounds(batches: Sequence[Record]) -> dict[tuple[int, int], list[Record]]:
    found: dict[tuple[int, int], list[Record]] = {}
    for batch in batches:
        found.setdefault((batch["seed"], batch["repeat"]), []).append(batch)
    return found


def _spread(batches: Sequence[Record], of: Callable[[Sequence[Record]], float | None]) -> Spread:
    rounds = list(_rounds(batches).values())
    values = [value for rows in rounds if (value := of(rows)) is not None]
    if len(rounds) > 1:
        return Spread(float(np.median(values)), min(values), max(values))
    groups: dict[int, list[Record]] = {}
    for batch in rounds[0]:
        groups.setdefault(batch["group"], []).append(batch)
    return bootstrap(values[0], list(groups.values()), lambda picked: of([row for rows in picked for row in rows]))


def _ratio_spread(
    above: Sequence[Record], below: Sequence[Record], of: Callable[[Sequence[Record]], float | None]
) -> Spread:
    """The ratio of a figure of two variants, round by round; of a single round, resampling both alike."""
    one, other = _rounds(above), _rounds(below)
    ratios = []
    for key in one.keys() & other.keys():
        a, b = of(one[key]), of(other[key])
        if a is not None and b:
            ratios.append(a / b)
    if len(one) > 1:
        return Spread(float(np.median(ratios)), min(ratios), max(ratios))
    (rows, others), random = (next(iter(one.values())), next(iter(other.values()))), np.random.default_rng(0)
    drawn = []
    for _ in range(_NUM_RESAMPLES):
        a = of([rows[index] for index in random.integers(0, len(rows), len(rows))])
        b = of([others[index] for index in random.integers(0, len(others), len(others))])
        if a is not None and b:
            drawn.append(a / b)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Spread(ratios[0], float(low), float(high))


def _sum(batches: Sequence[Record], name: str) -> int:
    return sum(batch["summary"][name] for batch in batches)


def _tokens_per_second(batches: Sequence[Record]) -> float:
    return _sum(batches, "num_emitted") / sum(batch["decode"] for batch in batches)


def _mean_latency(name: str) -> Callable[[Sequence[Record]], float | None]:
    def of(batches: Sequence[Record]) -> float | None:
        values = [batch["latency"][name] for batch in batches if batch["latency"][name] is not None]
        return float(np.mean(values)) if values else None

    return of


def _utilization(name: str) -> Callable[[Sequence[Record]], float]:
    def of(batches: Sequence[Record]) -> float:
        seconds = np.array([batch["decode"] for batch in batches])
        return float(np.dot(seconds, [batch["utilisation"][name] for batch in batches]) / seconds.sum())

    return of


def _acceptance(batches: Sequence[Record]) -> float | None:
    num_drafted = _sum(batches, "num_drafted")
    return _sum(batches, "num_accepted") / num_drafted if num_drafted else None


_MEASURES: dict[str, Callable[[Sequence[Record]], float | None]] = {
    "ptl_first": _mean_latency("first"),
    "ptl_last": _mean_latency("last"),
    "ptl_all": _mean_latency("all"),
    "tokens_per_second": _tokens_per_second,
    "block_efficiency": lambda batches: _sum(batches, "num_emitted") / _sum(batches, "num_row_steps"),
    "acceptance": _acceptance,
    "useful": _utilization("useful"),
    "verified": _utilization("verified"),
    "verified_and_draft": _utilization("verified_and_draft"),
}


def acceptance_by_position(batches: Sequence[Record]) -> tuple[float, ...]:
    """Adds the rates of all batches up, each by how often its position was reached."""
    length = max(len(batch["summary"]["num_reached_by_position"]) for batch in batches)
    reached, stood = np.zeros(length), np.zeros(length)
    for batch in batches:
        counts = np.asarray(batch["summary"]["num_reached_by_position"], float)
        rates = np.asarray([rate or 0.0 for rate in batch["summary"]["acceptance_by_position"]])
        reached[: len(counts)] += counts
        stood[: len(counts)] += counts * rates
    return tuple(float(a / b) for a, b in zip(stood, reached, strict=True) if b)
