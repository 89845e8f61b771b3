"""Figures with their spread: over seeds and repeats, or over problems."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

_NUM_RESAMPLES = 400


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure with its spread.

    Attributes:
        value: median over rounds (seed and repeat).
        low: smallest round; of a single round, lower end of the 95 % bootstrap interval over its problems.
        high: likewise.
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Writes ``value (low-high)``, each as `spec` says."""
        return f"{self.value:{spec}} ({self.low:{spec}}–{self.high:{spec}})"


def bootstrap[T](value: float, groups: Sequence[T], of: Callable[[Sequence[T]], float | None]) -> Spread:
    """Returns `value` with the 95 % interval of `of` over groups drawn with replacement."""
    random, drawn = np.random.default_rng(0), []
    for _ in range(_NUM_RESAMPLES if len(groups) > 1 else 0):
        found = of([groups[index] for index in random.integers(0, len(groups), len(groups))])
        if found is not None:
            drawn.append(found)
    low, high = np.percentile(drawn, [2.5, 97.5]) if drawn else (value, value)
    return Spread(value, float(low), float(high))
