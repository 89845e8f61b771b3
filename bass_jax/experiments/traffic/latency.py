"""From handles to what a traffic experiment reports."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bass_jax.engine import Counts, RequestHandle


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of one quantity over the requests.

    Attributes:
        mean: of all.
        p50: half of them have no more.
        p90: nine in ten have no more.
        p99: ninety-nine in a hundred have no more.
    """

    mean: float
    p50: float
    p90: float
    p99: float


@dataclasses.dataclass(frozen=True)
class TrafficSummary:
    """What the requests of one run were given; seconds on the run's clock.

    Attributes:
        num_requests: that were finished.
        num_tokens: emitted.
        seconds: from the first arrival to the last token.
        latency: from arrival to the last token.
        queueing: from arrival to a slot.
        first_token: from arrival to the first token.
        per_token: PTL: from the end of reading the prompt to the last token, over the tokens.
        tokens_per_second: of all requests.
        goodput: requests per second whose latency met the objective; NaN without one.
        objective: in seconds; None for none.
        num_steps: steps.
        mean_rows: running rows per step.
        mean_draft_len: drafts per running row and step.
        acceptance_rate: accepted over drafted; NaN without drafts.
        num_regroups: moves of the batch into another size.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    latency: Spread
    queueing: Spread
    first_token: Spread
    per_token: Spread
    tokens_per_second: float
    goodput: float
    objective: float | None
    num_steps: int
    mean_rows: float
    mean_draft_len: float
    acceptance_rate: float
    num_regroups: int


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """Mean and percentiles of `values`, linear between neighbors."""
    array = np.asarray(values, np.float64)
    return Spread(float(array.mean()), *(float(value) for value in np.percentile(array, [50, 90, 99])))


def summarize_traffic(
    handles: Sequence[RequestHandle], counts: Counts, objective: float | None = None
) -> TrafficSummary:
    """Measures a run.

    Args:
        handles: of all its requests; those that ended without a token are left out.
        counts: of its loop.
        objective: seconds of latency that a request shall not exceed.

    Raises:
        ValueError: if no request was given a token.
    """
    served = [handle for handle in handles if handle.num_tokens and handle.finish_reason is not None]
    if not served:
        raise ValueError("handles: expected at least one request that was given tokens")
    fields = ("submitted", "admitted", "begun", "first", "finished")
    submitted, admitted, begun, first, finished = (
        np.array([getattr(handle.times, name) for handle in served]) for name in fields
    )
    num_tokens = np.array([handle.num_tokens for handle in served])
    latency = finished - submitted
    seconds = float(finished.max() - submitted.min())
    return TrafficSummary(
        num_requests=len(served),
        num_tokens=int(num_tokens.sum()),
        seconds=seconds,
        latency=spread(latency),
        queueing=spread(admitted - submitted),
        first_token=spread(first - submitted),
        per_token=spread((finished - begun) / num_tokens),
        tokens_per_second=float(num_tokens.sum()) / seconds,
        goodput=float("nan") if objective is None else float((latency <= objective).sum()) / seconds,
        objective=objective,
        num_steps=counts.num_steps,
        mean_rows=counts.num_row_steps / counts.num_steps,
        mean_draft_len=counts.num_drafted / counts.num_row_steps,
        acceptance_rate=counts.num_accepted / counts.num_drafted if counts.num_drafted else float("nan"),
        num_regroups=counts.num_regroups,
    )
