"""Metrics of a run, computed from the infos of its steps."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from bass_jax.decoding.state import StepInfo
from bass_jax.runtime.checks import check_kind, check_number, shown


@dataclasses.dataclass(frozen=True)
class PerTokenLatency:
    """Decode time of a row divided by its emitted tokens, in seconds (Qian et al. 2024, BASS, section 4).

    Attributes:
        first: of the row that finished first.
        last: of the row that finished last.
        all: mean over the rows.
    """

    first: float
    last: float
    all: float


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Totals over the steps of a run. Padding rows and finished rows are not counted.

    Attributes:
        num_steps: steps in which a row was running.
        num_row_steps: the number of running rows, summed over the steps.
        num_drafted: draft tokens.
        num_verified: positions that the target computed for running rows: the drafts, and one more per row and step.
        num_accepted: drafts that the rule accepted, also those after a stop token or limit.
        num_rejected: drafts that were not accepted.
        num_padded: other positions that the target computed: padding rows, finished rows and unused draft positions of
            the bucket.
        num_emitted: committed tokens.
        acceptance_rate: accepted drafts divided by drafts; NaN without drafts.
        acceptance_by_position: ``[G]``, the acceptance rate of draft i given that the drafts before it were accepted;
            NaN if there was none.
        num_reached_by_position: ``[G]``, the denominators of `acceptance_by_position`.
        tokens_per_pass: emitted tokens per row and target pass, including the residual or bonus token.
    """

    num_steps: int
    num_row_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_rejected: int
    num_padded: int
    num_emitted: int
    acceptance_rate: float
    acceptance_by_position: tuple[float, ...]
    num_reached_by_position: tuple[int, ...]
    tokens_per_pass: float


def summarize(infos: Sequence[StepInfo] | StepInfo) -> Metrics:
    """Computes the metrics of a run.

    Args:
        infos: one per step, of one or several batches; or the stacked infos of `bass_jax.decoding.generate_on_device`.

    Raises:
        ValueError: if there is no step.
    """
    steps = step_counts(infos)
    drafted, accepted, emitted = (
        np.concatenate([getattr(step, name)[step.is_active] for step in steps])
        for name in ("num_drafted", "num_accepted", "num_emitted")
    )
    positions = np.arange(drafted.max(initial=0))[:, None]
    reached = ((drafted > positions) & (accepted >= positions)).sum(axis=1)
    passed = (accepted > positions).sum(axis=1)
    num_verified = int(drafted.sum()) + drafted.size
    # The device loop did not compute the steps that it did not need.
    num_computed = sum(step.width * len(step.is_active) for step in steps if step.is_active.any())
    return Metrics(
        num_steps=sum(bool(step.is_active.any()) for step in steps),
        num_row_steps=drafted.size,
        num_drafted=int(drafted.sum()),
        num_verified=num_verified,
        num_accepted=int(accepted.sum()),
        num_rejected=int(drafted.sum() - accepted.sum()),
        num_padded=num_computed - num_verified,
        num_emitted=int(emitted.sum()),
        acceptance_rate=_ratio(int(accepted.sum()), int(drafted.sum())),
        acceptance_by_position=tuple(_ratio(int(a), int(b)) for a, b in zip(passed, reached, strict=True)),
        num_reached_by_position=tuple(reached.tolist()),
        tokens_per_pass=_ratio(int(emitted.sum()), drafted.size),
    )


def per_token_latency(
    infos: Sequence[StepInfo], step_seconds: Sequence[float], requests: Sequence[np.ndarray] | None = None
) -> PerTokenLatency:
    """Divides the time from a row's first step to its last by the tokens that it emitted.

    Args:
        infos: one per step.
        step_seconds: wall time of each step, without compilation.
        requests: for each step ``[B]`` int32, the request in each row of the batch, -1 for a free row. Default: a row
            holds the same request in all steps.

    Raises:
        ValueError: if there is no step, or not one time per step.
    """
    steps = step_counts(infos)
    if np.ndim(step_seconds) != 1:
        raise ValueError(f"step_seconds={shown(step_seconds)}: expected a sequence of seconds, one per step")
    for seconds in step_seconds:
        check_number("step_seconds", seconds, 0)
    if len(step_seconds) != len(steps):
        raise ValueError(f"step_seconds has {len(step_seconds)} values: expected {len(steps)}")
    ends = np.cumsum(step_seconds)
    starts = ends - step_seconds
    start_of: dict[int, float] = {}
    end_of: dict[int, float] = {}
    num_emitted: Counter[int] = Counter()
    for index, step in enumerate(steps):
        names = np.arange(len(step.is_active)) if requests is None else requests[index]
        for row in np.flatnonzero(step.is_active).tolist():
            name = int(names[row])
            start_of.setdefault(name, float(starts[index]))
            end_of[name] = float(ends[index])
            num_emitted[name] += int(step.num_emitted[row])
    latency = {name: (end_of[name] - start_of[name]) / num_emitted[name] for name in end_of if num_emitted[name]}
    if not latency:
        return PerTokenLatency(float("nan"), float("nan"), float("nan"))
    first, last = (choose(latency, key=lambda name: end_of[name]) for choose in (min, max))
    return PerTokenLatency(first=latency[first], last=latency[last], all=float(np.mean(list(latency.values()))))


class StepCounts(NamedTuple):
    """The counts of one step as NumPy arrays."""

    is_active: np.ndarray  # [B] bool
    num_emitted: np.ndarray  # [B]
    num_accepted: np.ndarray  # [B]
    num_drafted: np.ndarray  # [B]
    width: int  # T, positions per row in the target's pass


def step_counts(infos: Sequence[StepInfo] | StepInfo) -> list[StepCounts]:
    """Returns the counts of each step, on the host.

    Args:
        infos: as in `summarize`.

    Raises:
        ValueError: if there is no step.
    """
    if isinstance(infos, StepInfo):
        infos = [infos]
    check_kind("infos", infos, list | tuple, "a StepInfo or a sequence of them")
    for info in infos:
        check_kind("infos", info, StepInfo, "a StepInfo or a sequence of them")
    if len(infos) == 0:
        raise ValueError("infos is empty: expected at least one step")
    steps = []
    for info in infos:
        fields = jax.device_get((info.is_active, info.num_emitted, info.num_accepted, info.num_drafted))
        is_active, *counts = map(np.asarray, fields)
        width = np.asarray(info.tokens.shape[-1] if info.width is None else jax.device_get(info.width))
        if is_active.ndim == 1:
            steps.append(StepCounts(is_active, counts[0], counts[1], counts[2], int(width)))
        else:  # The stacked infos of the device loop.
            widths = np.broadcast_to(width, is_active.shape[:1]).tolist()
            steps += [StepCounts(*step) for step in zip(is_active, *counts, widths, strict=True)]
    return steps


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
