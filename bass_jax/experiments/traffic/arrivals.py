"""Arrival times: Gamma-distributed inter-arrival times, rates that vary over time, and recordings."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bass_jax.runtime.files import read_jsonl


@dataclasses.dataclass(frozen=True)
class Phase:
    """A period with a constant arrival rate.

    Attributes:
        seconds: its length. The first phase follows the last.
        inter_arrival: mean seconds between two requests.
        cv: coefficient of variation of the inter-arrival times: 0 for equal ones, 1 for a Poisson process, above 1 for
            bursts.
    """

    seconds: float
    inter_arrival: float
    cv: float = 1.0

    def __post_init__(self):
        for name in ("seconds", "inter_arrival"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")
        if not self.cv >= 0:
            raise ValueError(f"cv={self.cv}: expected at least 0")


def gamma_intervals(num: int, cv: float, random: np.random.Generator) -> np.ndarray:
    """Samples inter-arrival times with mean 1: ``[num]`` float64.

    A Gamma distribution of shape ``1 / cv^2`` has the coefficient of variation `cv`.

    Source: Su et al. 2023 (arXiv 2310.18813), section 5.
    """
    return np.ones(num) if cv == 0 else random.gamma(1 / cv**2, cv**2, num)


def arrival_times(num: int, phases: Sequence[Phase], seed: int = 0) -> np.ndarray:
    """Samples the arrival times of `num` requests: ``[num]`` float64 seconds, ascending.

    The part of an inter-arrival time that lies in a later phase is scaled by that phase's rate, so that each phase has
    its own rate.

    Raises:
        ValueError: if there are no phases.
    """
    if not phases:
        raise ValueError("phases is empty: expected at least one")
    random = np.random.default_rng(seed)
    times, now, index, left = np.zeros(num), 0.0, 0, phases[0].seconds
    for request in range(num):
        phase = phases[index % len(phases)]
        interval = float(gamma_intervals(1, phase.cv, random)[0])
        while interval * phase.inter_arrival > left:
            interval -= left / phase.inter_arrival
            now, index = now + left, index + 1
            phase = phases[index % len(phases)]
            left = phase.seconds
        now, left = now + interval * phase.inter_arrival, left - interval * phase.inter_arrival
        times[request] = now
    return times


def phase_of(times: np.ndarray, phases: Sequence[Phase]) -> np.ndarray:
    """Returns the index of the phase in which each time lies: ``[num]`` int64."""
    ends = np.cumsum([phase.seconds for phase in phases])
    return np.searchsorted(ends, times % ends[-1], side="right")


class RecordedArrivals(NamedTuple):
    """Recorded arrivals (R requests)."""

    times: np.ndarray  # [R] float64 seconds since the first, ascending
    prompt_tokens: np.ndarray | None  # [R] int; None if not recorded
    new_tokens: np.ndarray | None  # [R] int; None if not recorded


def read_arrivals(path: str | Path) -> RecordedArrivals:
    """Reads a JSONL file with ``{"time": 0.25, "prompt_tokens": 120, "new_tokens": 80}`` per request.

    Raises:
        ValueError: naming the file and the line.
    """
    rows = []
    for number, row in read_jsonl(Path(path)):
        try:
            rows.append((float(row["time"]), row.get("prompt_tokens"), row.get("new_tokens")))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f'{path}:{number}: expected {{"time": seconds}}, and prompt_tokens, new_tokens') from None
    if not rows:
        raise ValueError(f"arrivals {path}: expected at least one request")
    times, *columns = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    counts = [None if None in column else np.asarray(column, int) for column in columns]
    if any(column is not None and column.min() < 1 for column in counts):
        raise ValueError(f"arrivals {path}: expected at least 1 token")
    return RecordedArrivals(np.asarray(times) - times[0], *counts)
