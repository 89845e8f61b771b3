"""Latency, throughput and goodput of the requests of a run."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bass_jax.engine import Counts, RequestHandle
from bass_jax.runtime.statistics import Percentiles, percentiles


@dataclasses.dataclass(frozen=True)
class TrafficSummary:
    """The measures of one run. Times are seconds on the run's clock.

    Attributes:
        num_requests: finished requests.
        num_tokens: emitted tokens.
        seconds: from the first arrival to the last token.
        latency: from the arrival to the last token.
        queueing: from the arrival to a slot.
        first_token: from the arrival to the first token.
        per_token: from the end of prefill to the last token, divided by the tokens (PTL).
        tokens_per_second: of all requests.
        goodput: requests per second whose latency met the objective; None without an objective.
        objective: latency in seconds; None for none.
        num_steps: steps of the loop.
        mean_rows: running rows per step.
        mean_draft_len: drafts per running row and step.
        acceptance_rate: accepted over drafted; None without drafts.
        num_regroups: changes of the batch size.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    latency: Percentiles
    queueing: Percentiles
    first_token: Percentiles
    per_token: Percentiles
    tokens_per_second: float
    goodput: float | None
    objective: float | None
    num_steps: int
    mean_rows: float
    mean_draft_len: float
    acceptance_rate: float | None
    num_regroups: int


def summarize_traffic(
    handles: Sequence[RequestHandle], counts: Counts, objective: float | None = None
) -> TrafficSummary:
    """Computes the measures of a run.

    Args:
        handles: of all its requests; requests that ended without a token are left out.
        counts: of its loop.
        objective: largest acceptable latency in seconds.

    Raises:
        ValueError: if no request received a token.
    """
    served = [handle for handle in handles if handle.num_tokens and handle.finish_reason is not None]
    if not served:
        raise ValueError("handles: expected at least one request that received tokens")
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
        latency=percentiles(latency),
        queueing=percentiles(admitted - submitted),
        first_token=percentiles(first - submitted),
        per_token=percentiles((finished - begun) / num_tokens),
        tokens_per_second=float(num_tokens.sum()) / seconds,
        goodput=None if objective is None else float((latency <= objective).sum()) / seconds,
        objective=objective,
        num_steps=counts.num_steps,
        mean_rows=counts.num_row_steps / counts.num_steps,
        mean_draft_len=counts.num_drafted / counts.num_row_steps,
        acceptance_rate=counts.num_accepted / counts.num_drafted if counts.num_drafted else None,
        num_regroups=counts.num_regroups,
    )
