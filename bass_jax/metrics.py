"""From step infos to what the papers report."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from bass_jax.state import StepInfo


@dataclasses.dataclass(frozen=True)
class PerTokenLatency:
    """Seconds of decoding per emitted token of a row (BASS, section 4).

    Attributes:
        first: of the row that finished first.
        last: of the row that finished last.
        all: mean over rows.
    """

    first: float
    last: float
    all: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """What happened over some steps; filler rows and finished rows count nowhere.

    Attributes:
        num_steps: steps in which any row was running.
        num_row_steps: target passes, counted per running row.
        num_drafted: draft tokens proposed.
        num_verified: positions that the target scored for running rows: drafts and one more per row step.
        num_accepted: drafts accepted by the rule, before a stop or limit cut the row.
        num_emitted: tokens committed.
        acceptance_rate: accepted over drafted; NaN without drafts.
        acceptance_by_position: ``[G]``; at position i, accepted over drafted-and-reached, that is the
            probability that draft i stands given that those before it did. NaN where none was reached.
        block_efficiency: mean tokens per target pass and row, residual or bonus token included.
    """

    num_steps: int
    num_row_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_emitted: int
    acceptance_rate: float
    acceptance_by_position: tuple[float, ...]
    block_efficiency: float


def summarize(infos: Sequence[StepInfo] | StepInfo) -> Summary:
    """Adds up the infos of a run.

    Args:
        infos: one per step; or one whose fields carry steps in front, as
            `bass_jax.generate_on_device` returns.

    Raises:
        ValueError: if there are none.
    """
    rows = _stacked(infos)
    active = rows.is_active
    drafted, accepted = rows.num_drafted[active], rows.num_accepted[active]
    emitted = int(rows.num_emitted[active].sum())
    num_row_steps = int(active.sum())
    positions = np.arange(drafted.max(initial=0))[:, None]
    reached = ((drafted > positions) & (accepted >= positions)).sum(axis=1)
    stood = (accepted > positions).sum(axis=1)
    return Summary(
        num_steps=int(active.any(axis=1).sum()),
        num_row_steps=num_row_steps,
        num_drafted=int(drafted.sum()),
        num_verified=int(drafted.sum()) + num_row_steps,
        num_accepted=int(accepted.sum()),
        num_emitted=emitted,
        acceptance_rate=_ratio(int(accepted.sum()), int(drafted.sum())),
        acceptance_by_position=tuple(_ratio(int(a), int(b)) for a, b in zip(stood, reached, strict=True)),
        block_efficiency=_ratio(emitted, num_row_steps),
    )


def per_token_latency(infos: Sequence[StepInfo], step_seconds: Sequence[float]) -> PerTokenLatency:
    """Divides each row's time until it finished by the tokens it emitted.

    Args:
        infos: one per step.
        step_seconds: wall time of each step, compilation left out.

    Raises:
        ValueError: if there are no steps, or not one time per step.
    """
    rows = _stacked(infos)
    if len(step_seconds) != len(rows.is_active):
        raise ValueError(f"step_seconds has {len(step_seconds)} values: expected {len(rows.is_active)}")
    elapsed = np.cumsum(step_seconds)
    num_emitted = rows.num_emitted.sum(axis=0)
    was_active = rows.is_active.any(axis=0) & (num_emitted > 0)
    if not was_active.any():
        return PerTokenLatency(float("nan"), float("nan"), float("nan"))
    last_step = len(elapsed) - 1 - np.argmax(rows.is_active[::-1], axis=0)
    end = elapsed[last_step][was_active]
    latency = end / num_emitted[was_active]
    return PerTokenLatency(
        first=float(latency[np.argmin(end)]), last=float(latency[np.argmax(end)]), all=float(latency.mean())
    )


def _stacked(infos: Sequence[StepInfo] | StepInfo) -> StepInfo:
    if isinstance(infos, StepInfo):
        infos = [infos]
    elif len(infos) == 0:
        raise ValueError("infos is empty: expected at least one step")
    # Steps of different buckets differ in T; only per-row fields are stacked.
    host = jax.device_get([info._replace(tokens=None, logprobs=None) for info in infos])

    def stack(name: str) -> np.ndarray:
        values = [np.asarray(getattr(info, name)) for info in host]
        return np.concatenate([value.reshape(-1, value.shape[-1]) for value in values])

    names = ("is_active", "num_emitted", "num_accepted", "num_drafted", "finish")
    return StepInfo(tokens=None, logprobs=None, **{name: stack(name) for name in names})  # type: ignore[arg-type]


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
