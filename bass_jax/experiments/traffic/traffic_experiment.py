"""Runs a traffic experiment: every pattern with every kind of batching and every policy."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bass_jax.experiments.run_directory import Record, append_records, open_records
from bass_jax.experiments.traffic.backends import Backend, OnStep
from bass_jax.experiments.traffic.latency import TrafficMetrics, summarize_traffic
from bass_jax.experiments.traffic.traffic_config import TrafficConfig
from bass_jax.runtime.statistics import Percentiles

RESULTS = "results.jsonl"
"""The file in the output directory with a line per run."""


class TrafficResult(NamedTuple):
    """The result of one run."""

    pattern: str
    batching: str
    policy: str
    metrics: TrafficMetrics
    is_kept: bool = False  # from an earlier call


def fingerprint(config: TrafficConfig, backend: Backend) -> str:
    """Returns a hash of everything that the result of a run depends on besides the speed of the machine."""
    fields = dataclasses.asdict(config) | {"backend": backend.identity}
    for name in ("name", "output_dir", "traffic", "batching", "policies"):
        del fields[name]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_traffic(
    config: TrafficConfig,
    backend: Backend,
    *,
    on_run: Callable[[str, str, str], None] = lambda pattern, batching, policy: None,
    on_step: OnStep | None = None,
) -> list[TrafficResult]:
    """Runs what the results file does not hold yet, and appends each result to it; returns all results in order.

    `on_run` is called before each run, and `on_step` after every step.

    Raises:
        ValueError: if the output directory cannot be written to.
    """
    path, mark = Path(config.output_dir) / RESULTS, fingerprint(config, backend)
    found: dict[str, TrafficResult] = {}

    def keep(record: Record) -> None:
        if record["config"] == mark:
            found[_key(record)] = _result(record, is_kept=True)

    results = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_records(path, keep) as file:
            for pattern in config.traffic:
                workload = None
                for batching, policy in itertools.product(config.batching, config.policies):
                    run = {"traffic": dataclasses.asdict(pattern), "batching": batching, "policy": policy}
                    if _key(run) not in found:
                        workload = workload or backend.workload(pattern)
                        on_run(pattern.name, batching, policy)
                        served = backend.serve(workload, batching, policy, on_step)
                        objective = None if config.objective is None else config.objective * backend.unit_seconds
                        phases = pattern.scaled_phases(backend.unit_seconds)
                        metrics = summarize_traffic(served.handles, served.counts, objective, phases)._asdict()
                        fields = {name: x._asdict() if isinstance(x, Percentiles) else x for name, x in metrics.items()}
                        record = {"config": mark, **run, "metrics": fields}
                        append_records(file, record)
                        found[_key(run)] = _result(record)
                    results.append(found[_key(run)])
    except OSError as error:
        raise ValueError(f"output_dir={config.output_dir}: cannot be written: {error.strerror}") from None
    return results


def gain_over_static(results: Sequence[TrafficResult]) -> dict[tuple[str, str], float]:
    """Returns (pattern, policy) → mean latency of static batching over that of continuous batching."""
    mean = {(one.pattern, one.policy, one.batching): one.metrics.latency.mean for one in results}
    return {
        (pattern, policy): mean[pattern, policy, "static"] / value
        for (pattern, policy, batching), value in mean.items()
        if batching == "continuous" and (pattern, policy, "static") in mean
    }


def gain_over_fixed(results: Sequence[TrafficResult], batching: str) -> dict[str, tuple[str, float, dict[str, float]]]:
    """Compares each adaptive policy with the better of the fixed draft lengths, by mean latency.

    The better fixed length is the same for all patterns: the one over which the policy gains least on average.

    Returns:
        Policy → that fixed length, the mean gain over the patterns, and the gain in each.
    """
    mine = [one for one in results if one.batching == batching]
    mean = {(one.policy, one.pattern): one.metrics.latency.mean for one in mine}
    names = list(dict.fromkeys(one.policy for one in mine))
    patterns = list(dict.fromkeys(one.pattern for one in mine))
    fixed = [name for name in names if name.startswith("fixed") and not name.endswith("=0)")]
    found = {}
    for name in names:
        if name.startswith("fixed") or not fixed:
            continue
        gains = {one: {pattern: mean[one, pattern] / mean[name, pattern] for pattern in patterns} for one in fixed}
        means = {one: sum(gain.values()) / len(gain) for one, gain in gains.items()}
        better = min(means, key=lambda one: means[one])
        found[name] = (better, means[better], gains[better])
    return found


def gain_over_phases(results: Sequence[TrafficResult], batching: str) -> dict[str, dict[str, float]]:
    """Compares each adaptive policy with the best other policy of each phase, chosen with hindsight.

    Returns:
        Policy → pattern with phases → mean latency if the requests of each phase had that of its best other policy,
        over the policy's mean latency.
    """
    mine = [one for one in results if one.batching == batching and one.metrics.phases]
    gains: dict[str, dict[str, float]] = {}
    for result in mine:
        others = [one for one in mine if one.pattern == result.pattern and one.policy != result.policy]
        if others and not result.policy.startswith("fixed"):
            by_phase = zip(*(one.metrics.phases for one in others), strict=True)
            means = [min(mean for _, mean in phase) for phase in by_phase]
            best = sum(num * mean for (num, _), mean in zip(result.metrics.phases, means, strict=True))
            total = sum(num * mean for num, mean in result.metrics.phases)
            gains.setdefault(result.policy, {})[result.pattern] = best / total
    return gains


def _key(record: Record) -> str:
    return json.dumps([record["traffic"], record["batching"], record["policy"]], sort_keys=True)


def _result(record: Record, *, is_kept: bool = False) -> TrafficResult:
    fields: dict[str, Any] = {
        name: Percentiles(**x) if isinstance(x, dict) else x for name, x in record["metrics"].items()
    }
    return TrafficResult(
        record["traffic"]["name"], record["batching"], record["policy"], TrafficMetrics(**fields), is_kept
    )
