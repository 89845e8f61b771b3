"""Latency, throughput and goodput of the requests of a run."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.engine import Counts, RequestHandle
from bass_jax.experiments.traffic.arrivals import Phase, phase_of
from bass_jax.runtime.statistics import Percentiles, percentiles


class TrafficMetrics(NamedTuple):
    """The measures of one run. Times are seconds on the run's clock."""

    num_requests: int  # finished
    num_tokens: int  # emitted
    seconds: float  # from the first arrival to the last token
    latency: Percentiles  # from the arrival to the last token
    queueing: Percentiles  # from the arrival to a slot
    first_token: Percentiles  # from the arrival to the first token
    per_token: Percentiles  # PTL: from the end of prefill to the last token, divided by the tokens
    tokens_per_second: float  # of all requests
    goodput: float | None  # requests per second whose latency met the objective; None without an objective
    objective: float | None  # largest acceptable latency; None for none
    num_steps: int
    mean_rows: float  # running rows per step
    mean_draft_len: float  # drafts per running row and step
    acceptance_rate: float | None  # accepted over drafted; None without drafts
    num_regroups: int  # changes of the batch size
    phases: Sequence[tuple[int, float]] = ()  # requests that arrived in each phase, and their mean latency


def summarize_traffic(
    handles: Sequence[RequestHandle],
    counts: Counts,
    objective: float | None = None,
    phases: Sequence[Phase] = (),
) -> TrafficMetrics:
    """Computes the measures of a run, without requests that ended without a token.

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
    of_phase = [latency[phase_of(submitted, phases) == index] for index in range(len(phases))]
    seconds = float(finished.max() - submitted.min())
    return TrafficMetrics(
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
        phases=[(len(one), float(one.mean()) if len(one) else 0.0) for one in of_phase],
    )
