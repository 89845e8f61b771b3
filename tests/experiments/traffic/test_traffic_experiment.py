"""The experiment from its configuration to its tables, and what it must show."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from bass_jax.cli import main as cli
from bass_jax.cli.traffic_display import results_tables
from bass_jax.engine import EngineConfig, RequestHandle
from bass_jax.engine.loop import Counts
from bass_jax.experiments.traffic import backends
from bass_jax.experiments.traffic.backends import SimulatedWorld
from bass_jax.experiments.traffic.latency import Spread, spread, summarize_traffic
from bass_jax.experiments.traffic.traffic_config import (
    ExperimentConfig,
    Requests,
    SimulatedDevice,
    Traffic,
    load_config,
)
from bass_jax.experiments.traffic.traffic_experiment import Result, fingerprint, over_fixed, over_static, run_experiment
from tests.engine.test_scheduler import request

ROOT = Path(__file__).parents[3]
SMALL = ExperimentConfig(
    "small", "nowhere", (Traffic("light", gap=0.5, num=30), Traffic("heavy", gap=0.06, num=100)),
    simulated=SimulatedDevice("a100", "opt-6.7b", "opt-125m"), requests=Requests(100, (32, 160), (64, 320)),
    engine=EngineConfig(32, 512, chunk=64), policies=("fixed(draft_len=2)", "fixed(draft_len=4)", "batch_table"),
    unit="service", objective=2.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    config = dataclasses.replace(SMALL, output_dir=str(tmp_path_factory.mktemp("traffic")))
    return config, run_experiment(config, SimulatedWorld(config))


def test_continuous_batching_beats_static_near_saturation(results):
    """In simulated time, on a simulated A100; docs/traffic.md has the whole experiment."""
    ratios = over_static(results[1])
    assert all(ratios["heavy", policy] > 1.5 for policy in SMALL.policies), ratios
    assert all(ratio > 1.0 for ratio in ratios.values()), ratios


def test_the_adaptive_length_beats_the_better_fixed_one(results):
    better, mean, by_pattern = over_fixed(results[1], "continuous")["batch_table"]
    assert better in SMALL.policies[:2]
    assert mean > 1.07, by_pattern
    assert min(by_pattern.values()) > 0.98


def test_every_run_serves_every_request(results):
    config, found = results
    assert len(found) == 2 * 2 * 3
    assert {one.summary.num_requests for one in found} == {30, 100}
    for pattern in ("light", "heavy"):
        assert len({one.summary.num_tokens for one in found if one.traffic == pattern}) == 1
    lines = [json.loads(line) for line in (Path(config.output_dir) / "results.jsonl").read_text().splitlines()]
    assert len(lines) == len(found)


def test_tables_fit_a_narrow_terminal(results):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*results_tables(results[1], "heavy"), sep="\n")
    text = console.export_text()
    assert "…" not in text
    for one in results[1]:
        if one.traffic == "heavy":
            assert f"{one.summary.latency.mean:.2f}" in text and f"{one.summary.tokens_per_second:.0f}" in text


def test_an_interrupted_experiment_goes_on_where_it_was(results, tmp_path):
    config, found = results
    lines = (Path(config.output_dir) / "results.jsonl").read_text().splitlines()
    config = dataclasses.replace(config, output_dir=str(tmp_path))
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:11]) + "\n" + lines[11][:40])
    ran = []
    again = run_experiment(config, SimulatedWorld(config), on_run=lambda *names: ran.append(names))
    assert [len(ran), ran[0]] == [1, ("heavy", "continuous", "batch_table")]
    assert [one._replace(is_kept=False) for one in again] == found, "deterministic from the seed"
    assert [one.is_kept for one in again].count(False) == 1
    ran.clear()
    run_experiment(dataclasses.replace(config, seed=1, traffic=config.traffic[:1], batching=("static",)),
                   SimulatedWorld(config), on_run=lambda *names: ran.append(names))  # fmt: skip
    assert len(ran) == 3, "another seed is another experiment"


def test_another_draft_is_another_experiment(tmp_path, monkeypatch):
    """And so are other prompts; the same files are the same experiment."""
    tokenizer = SimpleNamespace(encode_prompt=lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32))
    monkeypatch.setattr(backends, "load_pair", lambda path: (SimpleNamespace(tokenizer=tokenizer), tokenizer))
    draft = tmp_path / "draft" / "params"
    draft.parent.mkdir()
    draft.write_bytes(b"one")
    config = load_config(ROOT / "configs" / "traffic" / "quickstart_load.yaml")
    assert config.real is not None
    config = dataclasses.replace(config, real=dataclasses.replace(config.real, path=str(tmp_path)))

    def mark(*texts):
        return fingerprint(config, backends.RealWorld(config, texts))

    first = mark("a", "b")
    assert mark("a", "b") == first != mark("a", "c")
    draft.write_bytes(b"other")
    assert mark("a", "b") != first


def test_comparisons():
    """Of two patterns, the better fixed length is one for both."""
    zero = Spread(0.0, 0.0, 0.0, 0.0)

    def result(traffic, batching, policy, mean):
        fields = {"latency": Spread(mean, 0.0, 0.0, 0.0), "queueing": zero, "first_token": zero, "per_token": zero}
        numbers = dict.fromkeys(("num_requests", "num_tokens", "num_steps", "num_regroups"), 1)
        rest = dict.fromkeys(("seconds", "tokens_per_second", "goodput", "mean_rows", "mean_draft_len"), 1.0)
        from bass_jax.experiments.traffic.latency import TrafficSummary

        summary = TrafficSummary(**fields, **numbers, **rest, objective=None, acceptance_rate=1.0)
        return Result(traffic, batching, policy, summary)

    means = {"fixed(draft_len=0)": (1.0, 1.0), "fixed(draft_len=2)": (3.0, 2.0), "fixed(draft_len=4)": (2.0, 4.0),
             "mine": (2.0, 2.0)}  # fmt: skip
    found = [
        result(traffic, "continuous", policy, values[index])
        for policy, values in means.items() for index, traffic in enumerate("ab")
    ]  # fmt: skip
    assert over_fixed(found, "continuous") == {"mine": ("fixed(draft_len=2)", 1.25, {"a": 1.5, "b": 1.0})}
    found.append(result("a", "static", "mine", 5.0))
    assert over_static(found) == {("a", "mine"): 2.5}


def test_measures():
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
    summary = summarize_traffic([*handles, refused], counts, objective=3.5)
    assert summary.num_requests == 4 and summary.num_tokens == 40
    assert summary.latency == spread([2.0, 3.0, 4.0, 5.0]) and summary.latency.p50 == 3.5
    assert (summary.queueing.mean, summary.first_token.p99) == (0.5, 1.25)
    assert summary.per_token.mean == pytest.approx(np.mean([0.1, 0.2, 0.3, 0.4]))
    assert summary.seconds == 8.0 and summary.goodput == 2 / 8.0 and summary.tokens_per_second == 5.0
    assert (summary.mean_rows, summary.mean_draft_len, summary.acceptance_rate) == (2.5, 2.0, 0.4)
    with pytest.raises(ValueError, match="tickets"):
        summarize_traffic([refused], counts)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "traffic").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_configurations_are_read(path):
    config = load_config(path)
    assert (config.simulated is None) != (config.real is None)
    assert len(path.read_text().splitlines()) < 40


@pytest.mark.parametrize(
    "change, message",
    [
        ("unit: service", "unit: minutes"),
        ("gap: 2.0", "gap: -2.0"),
        ("device: h200, ", ""),
        ("seconds: 40", "second: 40"),
        ("num_slots: 64", "num_slots: 65"),
        ("capacity: 512", "capacity: 128"),
        ("name: gap 0.5", "name: gap 2"),
    ],
)
def test_configurations_that_are_none(tmp_path, change, message, capsys):
    """One line, which names the file and the place."""
    text = (ROOT / "configs" / "traffic" / "h200_opt.yaml").read_text()
    assert change in text
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace(change, message))
    assert cli.main(["traffic", str(path)]) == 2
    error = capsys.readouterr().err
    assert "wrong.yaml: " in error and len(error.splitlines()) == 1


def test_the_command(tmp_path):
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
policies: ["fixed(draft_len=2)", "goodput"]
objective: 0.2
traffic:
  - {{name: recorded, file: {arrivals}}}
  - {{name: varying, phases: [{{seconds: 1, mean_gap: 0.5}}, {{seconds: 1, mean_gap: 0.05, cv: 2}}]}}
""")
    found = subprocess.run(
        [sys.executable, "-m", "bass_jax.cli.main", "traffic", str(config)], capture_output=True, text=True, cwd=ROOT,
        env={"COLUMNS": "180", "PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    for word in ("recorded", "varying", "static over continuous", "better fixed", "goodput", "simulated time"):
        assert word in found.stdout
    assert (tmp_path / "out" / "plot.png").stat().st_size > 10_000
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 8


def test_checks_need_a_pair(tmp_path, capsys):
    assert cli.main(["traffic", str(ROOT / "configs/traffic/h200_opt.yaml"), "--agreement"]) == 2
    assert "real time" in capsys.readouterr().err
