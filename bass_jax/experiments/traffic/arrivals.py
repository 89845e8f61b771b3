"""When requests come: Gamma gaps, rates that vary in time, recorded traces."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of time with a rate of its own.

    Attributes:
        seconds: how long it lasts; what follows the last phase is the first.
        mean_gap: seconds between two requests.
        cv: coefficient of variation of the gaps: 0 is a clock, 1 a Poisson process, more comes in bursts.
    """

    seconds: float
    mean_gap: float
    cv: float = 1.0

    def __post_init__(self):
        for name in ("seconds", "mean_gap"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")
        if not self.cv >= 0:
            raise ValueError(f"cv={self.cv}: expected at least 0")


def gamma_gaps(num: int, cv: float, random: np.random.Generator) -> np.ndarray:
    """Draws gaps of mean 1: ``[num]`` float64.

    A Gamma distribution of shape ``1 / cv^2`` has the coefficient of variation `cv`.

    Source: Su et al. 2023 (arXiv 2310.18813), section 5.
    """
    return np.ones(num) if cv == 0 else random.gamma(1 / cv**2, cv**2, num)


def arrival_times(num: int, phases: Sequence[Phase], seed: int = 0) -> np.ndarray:
    """Draws when `num` requests come: ``[num]`` float64 seconds, ascending.

    A gap that reaches into another phase is stretched or compressed there by that phase's rate, so that each phase has
    its own mean whatever came before it.

    Raises:
        ValueError: if there are no phases.
    """
    if not phases:
        raise ValueError("phases is empty: expected at least one")
    random = np.random.default_rng(seed)
    times, now, index, left = np.zeros(num), 0.0, 0, phases[0].seconds
    for request in range(num):
        phase = phases[index % len(phases)]
        work = float(gamma_gaps(1, phase.cv, random)[0])
        while work * phase.mean_gap > left:
            work -= left / phase.mean_gap
            now, index = now + left, index + 1
            phase = phases[index % len(phases)]
            left = phase.seconds
        now, left = now + work * phase.mean_gap, left - work * phase.mean_gap
        times[request] = now
    return times


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Arrivals as somebody recorded them.

    Attributes:
        times: ``[R]`` float64 seconds from the first, ascending.
        prompt_tokens: ``[R]`` int; None where they were not recorded.
        new_tokens: ``[R]`` int; None where they were not recorded.
    """

    times: np.ndarray
    prompt_tokens: np.ndarray | None
    new_tokens: np.ndarray | None


def read_arrivals(path: str | Path) -> Recorded:
    """Reads a JSONL file: ``{"time": 0.25, "prompt_tokens": 120, "new_tokens": 80}`` per request.

    Raises:
        ValueError: naming file and line.
    """
    rows = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"arrivals {path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((float(row["time"]), row.get("prompt_tokens"), row.get("new_tokens")))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError):
            raise ValueError(f'{path}:{number}: expected {{"time": seconds}}, and prompt_tokens, new_tokens') from None
    if not rows:
        raise ValueError(f"arrivals {path}: expected at least one request")
    times, prompts, news = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    found = [None if None in counts else np.asarray(counts, int) for counts in (prompts, news)]
    if any(counts is not None and counts.min() < 1 for counts in found):
        raise ValueError(f"arrivals {path}: expected at least 1 token")
    return Recorded(np.asarray(times) - times[0], *found)
