"""A traffic experiment from its configuration to its tables, and the gains that it must show."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bass_jax.cli import main as cli
from bass_jax.cli.output import Output
from bass_jax.cli.traffic_display import print_results
from bass_jax.engine import EngineConfig, RequestHandle
from bass_jax.engine.loop import Counts
from bass_jax.experiments.traffic import backends
from bass_jax.experiments.traffic.arrivals import Phase
from bass_jax.experiments.traffic.backends import SimulatedBackend
from bass_jax.experiments.traffic.latency import TrafficMetrics, summarize_traffic
from bass_jax.experiments.traffic.traffic_config import (
    RequestsConfig,
    SimulatedDevice,
    TrafficConfig,
    TrafficPattern,
    load_traffic_config,
)
from bass_jax.experiments.traffic.traffic_experiment import (
    TrafficResult,
    fingerprint,
    gain_over_fixed,
    gain_over_phases,
    gain_over_static,
    run_traffic,
)
from bass_jax.runtime.statistics import Percentiles, percentiles
from tests.engine.test_scheduler import request

ROOT = Path(__file__).parents[3]
SMALL = TrafficConfig(
    "small",
    "nowhere",
    (TrafficPattern("light", inter_arrival=0.5, num=30), TrafficPattern("heavy", inter_arrival=0.06, num=100)),
    simulated=SimulatedDevice("a100", "opt-6.7b", "opt-125m"),
    requests=RequestsConfig(100, (32, 160), (64, 320)),
    engine=EngineConfig(32, 512, chunk=64),
    policies=("fixed(draft_len=2)", "fixed(draft_len=4)", "batch_table"),
    unit="service",
    objective=2.0,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    config = dataclasses.replace(SMALL, output_dir=str(tmp_path_factory.mktemp("traffic")))
    return config, run_traffic(config, SimulatedBackend(config))


@pytest.mark.slow
def test_continuous_batching_beats_static_near_saturation(results):
    """In simulated time, on a simulated A100; docs/how_to/traffic.md has the whole experiment."""
    ratios = gain_over_static(results[1])
    assert all(ratios["heavy", policy] > 1.5 for policy in SMALL.policies), ratios
    assert all(ratio > 1.0 for ratio in ratios.values()), ratios


@pytest.mark.slow
def test_the_adaptive_length_beats_the_better_fixed_length(results):
    better, mean, by_pattern = gain_over_fixed(results[1], "continuous")["batch_table"]
    assert better in SMALL.policies[:2]
    assert mean > 1.07, by_pattern
    assert min(by_pattern.values()) > 0.98


@pytest.mark.slow
def test_every_run_serves_every_request(results):
    config, found = results
    assert len(found) == 2 * 2 * 3
    assert {one.metrics.num_requests for one in found} == {30, 100}
    for pattern in ("light", "heavy"):
        assert len({one.metrics.num_tokens for one in found if one.pattern == pattern}) == 1
    lines = [json.loads(line) for line in (Path(config.output_dir) / "results.jsonl").read_text().splitlines()]
    assert len(lines) == len(found)


@pytest.mark.slow
def test_tables_fit_a_narrow_terminal(results, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    print_results(Output("traffic"), results[1], "heavy")
    text = capsys.readouterr().out
    assert "…" not in text
    for one in results[1]:
        if one.pattern == "heavy":
            assert f"{one.metrics.latency.mean:.2f}" in text and f"{one.metrics.tokens_per_second:.0f}" in text


@pytest.mark.slow
def test_an_interrupted_experiment_resumes(results, tmp_path):
    config, found = results
    lines = (Path(config.output_dir) / "results.jsonl").read_text().splitlines()
    config = dataclasses.replace(config, output_dir=str(tmp_path))
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:11]) + "\n" + lines[11][:40])
    ran = []
    again = run_traffic(config, SimulatedBackend(config), on_run=lambda *names: ran.append(names))
    assert [len(ran), ran[0]] == [1, ("heavy", "continuous", "batch_table")]
    assert [one._replace(is_kept=False) for one in again] == found, "deterministic from the seed"
    assert [one.is_kept for one in again].count(False) == 1
    ran.clear()
    other = dataclasses.replace(config, seed=1, traffic=config.traffic[:1], batching=("static",))
    run_traffic(other, SimulatedBackend(config), on_run=lambda *names: ran.append(names))
    assert len(ran) == 3, "another seed is another experiment"


def test_another_draft_is_another_experiment(tmp_path, monkeypatch):
    """So are other prompts; the same files are the same experiment."""
    tokenizer = SimpleNamespace(encode_prompt=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32))
    monkeypatch.setattr(backends, "load_pair", lambda path: SimpleNamespace(tokenizer=tokenizer))
    draft = tmp_path / "draft" / "params"
    draft.parent.mkdir()
    draft.write_bytes(b"one")
    config = load_traffic_config(ROOT / "configs" / "traffic" / "quickstart_load.yaml")
    assert config.real is not None
    config = dataclasses.replace(config, real=dataclasses.replace(config.real, path=str(tmp_path)))

    def mark(*texts):
        return fingerprint(config, backends.RealBackend(config, texts))

    first = mark("a", "b")
    assert mark("a", "b") == first != mark("a", "c")
    draft.write_bytes(b"other")
    assert mark("a", "b") != first


def test_gains():
    """The better fixed length is the same for both patterns."""
    zero = Percentiles(0.0, 0.0, 0.0, 0.0)

    def result(pattern, batching, policy, mean):
        fields = {"latency": Percentiles(mean, 0.0, 0.0, 0.0), "queueing": zero, "first_token": zero, "per_token": zero}
        numbers = dict.fromkeys(("num_requests", "num_tokens", "num_steps", "num_regroups"), 1)
        rest = dict.fromkeys(("seconds", "tokens_per_second", "goodput", "mean_rows", "mean_draft_len"), 1.0)
        summary = TrafficMetrics(**fields, **numbers, **rest, objective=None, acceptance_rate=1.0)
        return TrafficResult(pattern, batching, policy, summary)

    means = {
        "fixed(draft_len=0)": (1.0, 1.0),
        "fixed(draft_len=2)": (3.0, 2.0),
        "fixed(draft_len=4)": (2.0, 4.0),
        "mine": (2.0, 2.0),
    }
    found = [
        result(pattern, "continuous", policy, values[index])
        for policy, values in means.items()
        for index, pattern in enumerate("ab")
    ]
    assert gain_over_fixed(found, "continuous") == {"mine": ("fixed(draft_len=2)", 1.25, {"a": 1.5, "b": 1.0})}
    found.append(result("a", "static", "mine", 5.0))
    assert gain_over_static(found) == {("a", "mine"): 2.5}
    assert gain_over_phases(found, "continuous") == {}
    phases = {"fixed(draft_len=0)": [(1, 2.0), (3, 1.0)], "fixed(draft_len=2)": [(1, 1.0), (3, 2.0)]}
    phases["mine"] = [(1, 2.0), (3, 2.0)]
    found = [one._replace(metrics=one.metrics._replace(phases=phases.get(one.policy, ()))) for one in found]
    assert gain_over_phases(found, "continuous") == {"mine": {"a": 0.5, "b": 0.5}}


def test_the_summary_of_a_run():
    handles = []
    for index in range(4):
        handle = RequestHandle(request())
        handle.num_tokens, handle.finish_reason = 10, "length"
        times = handle.times
        times.submitted, times.admitted, times.begun, times.first, times.finished = (
            index + offset for offset in (0.0, 0.5, 1.0, 1.25, 2.0 + index)
        )
        handles.append(handle)
    refused = RequestHandle(request())
    refused.finish_reason = "cancelled"
    counts = Counts(num_steps=10, num_row_steps=25, num_drafted=50, num_accepted=20, num_emitted=40)
    phases = [Phase(1.5, 1.0), Phase(0.5, 1.0), Phase(10.0, 1.0)]
    summary = summarize_traffic([*handles, refused], counts, objective=3.5, phases=phases)
    assert summary.phases == [(2, 2.5), (0, 0.0), (2, 4.5)]
    assert summary.num_requests == 4 and summary.num_tokens == 40
    assert summary.latency == percentiles([2.0, 3.0, 4.0, 5.0]) and summary.latency.p50 == 3.5
    assert (summary.queueing.mean, summary.first_token.p99) == (0.5, 1.25)
    assert summary.per_token.mean == pytest.approx(np.mean([0.1, 0.2, 0.3, 0.4]))
    assert summary.seconds == 8.0 and summary.goodput == 2 / 8.0 and summary.tokens_per_second == 5.0
    assert (summary.mean_rows, summary.mean_draft_len, summary.acceptance_rate) == (2.5, 2.0, 0.4)
    with pytest.raises(ValueError, match="handles"):
        summarize_traffic([refused], counts)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "traffic").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_configurations_are_valid(path):
    config = load_traffic_config(path)
    assert (config.simulated is None) != (config.real is None)
    assert len(path.read_text().splitlines()) < 40


@pytest.mark.parametrize(
    "change, message",
    [
        ("unit: service", "unit: minutes"),
        ("inter_arrival: 2.0", "inter_arrival: -2.0"),
        ("device: h200, ", ""),
        ("seconds: 40", "second: 40"),
        ("num_slots: 64", "num_slots: 0"),
        ("capacity: 512", "capacity: 128"),
        ("name: every 0.5", "name: every 2"),
    ],
)
def test_invalid_configurations_are_refused(tmp_path, change, message, capsys):
    """The error is one line that names the file."""
    text = (ROOT / "configs" / "traffic" / "h200_opt.yaml").read_text()
    assert change in text
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace(change, message))
    assert cli.main(["traffic", str(path)]) == 2
    error = capsys.readouterr().err
    assert "wrong.yaml: " in error and len(error.splitlines()) == 1


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    """Tables, comparisons and a plot, from a configuration with a recorded and a varying pattern."""
    arrivals = tmp_path / "arrivals.jsonl"
    arrivals.write_text(
        "".join(f'{{"time": {0.05 * i}, "prompt_tokens": 20, "new_tokens": {5 + i}}}\n' for i in range(12))
    )
    config = tmp_path / "small.yaml"
    config.write_text(f"""
name: small
output_dir: {tmp_path / "out"}
simulated: {{device: h200, target: opt-1.3b, draft: opt-125m}}
engine: {{num_slots: 4, capacity: 128, chunk: 64}}
requests: {{num: 12, prompt_tokens: [8, 30], new_tokens: [4, 30]}}
policies: ["fixed(draft_len=2)", "auto"]
objective: 0.2
traffic:
  - {{name: recorded, file: {arrivals}}}
  - {{name: varying, phases: [{{seconds: 1, inter_arrival: 0.5}}, {{seconds: 1, inter_arrival: 0.05, cv: 2}}]}}
""")
    monkeypatch.setenv("COLUMNS", "180")
    assert cli.main(["traffic", str(config)]) == 0
    printed = capsys.readouterr().out
    for word in ("recorded", "varying", "static over continuous", "better fixed", "auto", "simulated time"):
        assert word in printed
    assert (tmp_path / "out" / "plot.png").stat().st_size > 10_000
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 8


def test_checks_need_a_pair(tmp_path, capsys):
    assert cli.main(["traffic", str(ROOT / "configs/traffic/h200_opt.yaml"), "--agreement"]) == 2
    assert "real time" in capsys.readouterr().err
