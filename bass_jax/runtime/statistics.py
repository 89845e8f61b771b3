"""Medians with ranges, bootstrap intervals and percentiles."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_NUM_RESAMPLES = 400


class Spread(NamedTuple):
    """A value with its uncertainty."""

    value: float
    low: float  # smallest repetition, or lower end of the 95 % bootstrap interval
    high: float

    def __format__(self, spec: str) -> str:
        """Writes ``value (low-high)``, each number formatted by `spec`."""
        return f"{self.value:{spec}} ({self.low:{spec}}–{self.high:{spec}})"

    def scaled(self, factor: float) -> "Spread":
        """Returns the spread in another unit."""
        return Spread(*(factor * value for value in self))


class Percentiles(NamedTuple):
    """The mean and percentiles of some values."""

    mean: float
    p50: float
    p90: float
    p99: float


def spread_of_rounds(estimate: Callable[..., float | None], rounds: Sequence[tuple[Sequence, ...]]) -> Spread | None:
    """Returns the spread of an estimate over rounds, or of a single round by bootstrap; None without an estimate.

    Args:
        estimate: computes the value of a round from its samples; None if there is none.
        rounds: the samples of each round, which are the arguments of `estimate`.
    """
    values = [value for samples in rounds if (value := estimate(*samples)) is not None]
    if not values or len(values) < len(rounds):
        return None
    if len(values) == 1:
        return bootstrap(estimate, *rounds[0])
    return Spread(float(np.median(values)), min(values), max(values))


def bootstrap(estimate: Callable[..., float | None], *samples: Sequence) -> Spread:
    """Returns an estimate with its 95 % interval over samples drawn with replacement, each independently.

    Raises:
        ValueError: if the estimate of the samples themselves is None.
    """
    value = estimate(*samples)
    if value is None:
        raise ValueError("samples: expected some that have an estimate")
    random, drawn = np.random.default_rng(0), []
    for _ in range(_NUM_RESAMPLES if max(map(len, samples)) > 1 else 0):
        picked = [[one[index] for index in random.integers(0, len(one), len(one))] for one in samples]
        if (resampled := estimate(*picked)) is not None:
            drawn.append(resampled)
    low, high = np.percentile(drawn, [2.5, 97.5]).tolist() if drawn else (value, value)
    return Spread(value, low, high)


def percentiles(values: Sequence[float] | np.ndarray) -> Percentiles:
    """Returns mean and percentiles of `values`, interpolated linearly."""
    array = np.asarray(values, np.float64)
    return Percentiles(float(array.mean()), *np.percentile(array, [50, 90, 99]).tolist())
