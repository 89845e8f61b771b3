"""Every pattern with every way of batching and every policy, on the same requests; results as they come."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bass_jax.experiments.traffic.backends import OnStep, World
from bass_jax.experiments.traffic.latency import Spread, TrafficSummary, summarize_traffic
from bass_jax.experiments.traffic.traffic_config import ExperimentConfig

RESULTS = "results.jsonl"
"""In the output directory; a line per run."""


class Result(NamedTuple):
    """One run of an experiment."""

    traffic: str
    batching: str
    policy: str
    summary: TrafficSummary
    is_kept: bool = False  # read from the results of an earlier start


def fingerprint(config: ExperimentConfig, world: World) -> str:
    """A hash of all that decides over a run's result, but for the device's moods."""
    fields = dataclasses.asdict(config) | {"world": world.identity}
    for name in ("name", "output_dir", "traffic", "batching", "policies"):
        del fields[name]
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_experiment(
    config: ExperimentConfig,
    world: World,
    *,
    on_run: Callable[[str, str, str], None] = lambda traffic, batching, policy: None,
    on_step: OnStep | None = None,
) -> list[Result]:
    """Runs what is not in the results yet; an interrupted experiment goes on where it was.

    Args:
        config: the experiment.
        world: where it takes place.
        on_run: told which run comes next.
        on_step: called after every step of every run.

    Returns:
        All results, in the order of the configuration.

    Raises:
        ValueError: if the output directory cannot be written to.
    """
    path = Path(config.output_dir) / RESULTS
    mark = fingerprint(config, world)
    found = {}
    for line in _lines(path):
        if line["config"] == mark:
            found[_key(line)] = _result(line)
    results = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as sink:
            for traffic in config.traffic:
                workload = None
                for batching in config.batching:
                    for policy in config.policies:
                        about = {"traffic": dataclasses.asdict(traffic), "batching": batching, "policy": policy}
                        if _key(about) not in found:
                            workload = world.workload(traffic) if workload is None else workload
                            on_run(traffic.name, batching, policy)
                            outcome = world.serve(workload, batching, policy, on_step)
                            objective = None if config.objective is None else config.objective * world.unit_seconds
                            summary = summarize_traffic(outcome.handles, outcome.counts, objective)
                            found[_key(about)] = Result(traffic.name, batching, policy, summary)
                            record = {"config": mark, **about, "summary": dataclasses.asdict(summary)}
                            sink.write(json.dumps(record) + "\n")
                            sink.flush()
                        results.append(found[_key(about)])
    except OSError as error:
        raise ValueError(f"output_dir={config.output_dir}: cannot be written: {error.strerror}") from None
    return results


def over_static(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """By how much continuous batching lowers the mean latency: (traffic, policy) → static over continuous."""
    mean = {(one.traffic, one.policy, one.batching): one.summary.latency.mean for one in results}
    return {
        (traffic, policy): mean[traffic, policy, "static"] / value
        for (traffic, policy, batching), value in mean.items()
        if batching == "continuous" and (traffic, policy, "static") in mean
    }


def over_fixed(results: Sequence[Result], batching: str) -> dict[str, tuple[str, float, dict[str, float]]]:
    """By how much each adaptive policy lowers the mean latency below the better of the fixed draft lengths.

    The better fixed length is one for all patterns, that over which the policy gains least in the mean.

    Returns:
        Policy → that fixed length, the mean gain over the patterns, and the gain in each.
    """
    mine = [one for one in results if one.batching == batching]
    mean = {(one.policy, one.traffic): one.summary.latency.mean for one in mine}
    names = list(dict.fromkeys(one.policy for one in mine))
    patterns = list(dict.fromkeys(one.traffic for one in mine))
    fixed = [name for name in names if name.startswith("fixed") and not name.endswith("=0)")]
    gains = {}
    for name in names:
        if name.startswith("fixed") or not fixed:
            continue
        by_fixed = {one: {p: mean[one, p] / mean[name, p] for p in patterns} for one in fixed}
        means = {one: sum(gained.values()) / len(gained) for one, gained in by_fixed.items()}
        better = min(means, key=lambda one: means[one])
        gains[name] = (better, means[better], by_fixed[better])
    return gains


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when a run was killed


def _key(record: dict[str, Any]) -> str:
    return json.dumps([record["traffic"], record["batching"], record["policy"]], sort_keys=True)


def _result(record: dict[str, Any]) -> Result:
    fields: dict[str, Any] = {
        name: Spread(**value) if isinstance(value, dict) else value for name, value in record["summary"].items()
    }
    summary = TrafficSummary(**fields)
    return Result(record["traffic"]["name"], record["batching"], record["policy"], summary, is_kept=True)
