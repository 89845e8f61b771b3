"""Runs: their records, resumption after a kill, and greedy tokens equal to those of regular decoding on every task."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from bass_jax.experiments import parse_experiment, read_run, run_directory, run_experiment
from bass_jax.experiments.plan import make_plan, row_seed, share_of
from tests.experiments.conftest import ROWS, written

ROOT = Path(__file__).parents[2]


def run(content: dict, **changes) -> Path:
    return run_experiment(parse_experiment(content | changes))


def tokens(path: Path) -> dict:
    return {run_directory.sample_key(sample): sample["tokens"] for sample in written(path)}


def test_a_run_has_all_records(content):
    path = run(content)
    samples, batches = written(path), written(path, "batches")
    assert len(samples) == 4 * 4 * 4
    assert len({run_directory.sample_key(sample) for sample in samples}) == len(samples)
    # Four samples of each of four problems: one batch per problem, or four batches of one row.
    assert len(batches) == 4 * (1 + 4 + 1 + 1)
    session = json.loads((path / "run.json").read_text())["sessions"][0]
    assert {"command", "versions", "device", "git", "date"} <= session.keys()
    assert read_run(path).config == parse_experiment(content)
    for sample in samples:
        assert sample["num_tokens"] == len(sample["tokens"]) == 10 or sample["finish_reason"] == "stop"
        assert sample["seconds"] > 0 and sample["mean_logprob"] < 0


def test_single_sequences_run_one_after_another_on_one_clock(content):
    path = run(content, methods={"single": {"batch": 1, "draft_len": 2}})
    by_problem: dict[str, list[float]] = {}
    for sample in written(path):
        by_problem.setdefault(sample["problem"], []).append(sample["seconds"])
    assert all(seconds == sorted(seconds) and len(set(seconds)) == 4 for seconds in by_problem.values())
    for batch in written(path, "batches"):
        assert batch["end"] == pytest.approx(batch["start"] + batch["prefill"] + batch["decode"], abs=1e-4)


@pytest.mark.parametrize("task", sorted(ROWS))
def test_greedy_samples_are_those_of_regular_decoding(content, data, task):
    """On every task, for single sequences, ragged batches and synchronized."""
    content |= {"task": {"name": task, "data": data[task]}, "num_samples": 1}
    content["methods"]["single"]["num_samples"] = 1
    found = tokens(run(content))
    regular = {key[1:]: value for key, value in found.items() if key[0] == "regular"}
    assert len(regular) == len(ROWS[task])
    for key, value in found.items():
        assert value == regular[key[1:]], key


@pytest.mark.slow
def test_samples_do_not_depend_on_batch_or_number_of_problems(content):
    content["sampling"] = {"temperature": 1.0}
    content["methods"] = {"batched": {"batch": [1, 4], "draft_len": 2}}
    found = tokens(run(content))
    for key, value in found.items():
        assert value == found[("batched, batch 1", *key[1:])]
    fewer = tokens(run(content, output_dir=content["output_dir"] + "-2", task=content["task"] | {"limit": 2}))
    assert all(found[key] == value for key, value in fewer.items()) and len(fewer) == len(found) // 2


def test_another_configuration_is_refused(content):
    """The error shows the keys that differ and no others."""
    methods = {"regular": {"step": "decode", "batch": 4}}
    run(content, methods=methods, num_samples=1)
    with pytest.raises(ValueError) as error:
        run(content, methods={"regular": {"step": "decode", "batch": 2}}, num_samples=1, max_new_tokens=11)
    shown = "methods.regular.batch is 4 there and 2 here, max_new_tokens is 10 there and 11 here"
    assert f"holds results of another configuration: {shown}; expected another output_dir" in str(error.value)


def test_a_run_without_results_does_not_keep_its_directory(content):
    """It failed before its first batch, and its configuration was corrected."""
    methods = {"regular": {"step": "decode", "batch": 4}}
    with pytest.raises(ValueError, match="no/such/draft"):
        run(content, methods={"batched": {"draft": "no/such/draft"}}, num_samples=1)
    path = run(content, methods=methods, num_samples=1)
    assert list(read_run(path).config.methods) == ["regular"]
    assert len(read_run(path).sessions) == 1


def test_a_directory_has_one_writer(content):
    config = parse_experiment(content)
    with (
        run_directory.RunDirectory(config.output_dir, config),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        run_directory.RunDirectory(config.output_dir, config)


@pytest.mark.slow
def test_after_a_cut_at_any_byte_a_run_ends_with_the_same_samples(content):
    """A kill leaves a prefix of each file, and samples are written before their batch."""
    content |= {"sampling": {"temperature": 1.0}, "methods": {"batched": {"batch": 2, "draft_len": 2}}}
    path = run(content)
    whole = tokens(path)
    files = {name: (path / f"{name}.jsonl").read_bytes() for name in ("samples", "batches")}
    draw = random.Random(0)
    for _ in range(10):
        size = draw.randrange(len(files["batches"]))
        num_whole = files["batches"][:size].count(b"\n")
        # All samples of whole batches, and some bytes of what follows.
        ends = [i for i, byte in enumerate(files["samples"], 1) if byte == ord("\n")]
        least = ends[2 * num_whole - 1] if num_whole else 0
        (path / "batches.jsonl").write_bytes(files["batches"][:size])
        (path / "samples.jsonl").write_bytes(files["samples"][: draw.randrange(least, len(files["samples"]))])
        kept = written_whole(path)
        run(content)
        assert tokens(path) == whole
        again = {run_directory.sample_key(sample): sample["seconds"] for sample in written(path)}
        # Complete batches are not decoded again, so their times are those of the first run.
        assert all(again[key] == seconds for key, seconds in kept.items()) and len(kept) == 2 * num_whole


def written_whole(path: Path) -> dict:
    """Times of the samples of whole batches."""
    if b"\n" not in (path / "batches.jsonl").read_bytes():
        return {}
    return {run_directory.sample_key(sample): sample["seconds"] for sample in read_run(path).samples}


@pytest.mark.slow
def test_after_ten_kills_a_run_ends_with_the_same_samples(content, tmp_path):
    content |= {"sampling": {"temperature": 1.0}, "max_new_tokens": 60, "seeds": list(range(12))}
    content["methods"] = {"batched": {"batch": 4, "draft_len": 2}}
    uninterrupted = tokens(run(content, output_dir=str(tmp_path / "uninterrupted")))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "bass_jax.cli.main", "run", str(config), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    path, draw, num_kills, sizes = Path(content["output_dir"]), random.Random(1), 0, []
    while num_kills < 10:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        samples, before = path / "samples.jsonl", sizes[-1] if sizes else 0
        while process.poll() is None and not (samples.exists() and samples.stat().st_size > before):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        sizes.append(samples.stat().st_size)
        num_kills += 1
    assert len(tokens_whole(path)) < len(uninterrupted)
    assert run_experiment(parse_experiment(content)) == path
    assert tokens(path) == uninterrupted


def tokens_whole(path: Path) -> dict:
    return {run_directory.sample_key(sample): sample["tokens"] for sample in read_run(path).samples}


def test_a_time_budget_stops_rows_and_records_them(content):
    """With almost no time, every row has a record, and none has finished."""
    path = run(content, budget=1e-9)
    samples = written(path)
    assert len(samples) == 64
    assert {sample["finish_reason"] for sample in samples} == {"budget"}
    single = [sample for sample in samples if sample["variant"] == "single"]
    # Only the first sequence starts before the time is up.
    assert all(sample["num_tokens"] == 0 for sample in single if sample["sample"] > 0)
    generous = run(content, budget=1e9, output_dir=content["output_dir"] + "-2")
    assert {sample["finish_reason"] for sample in written(generous)} <= {"length", "stop"}


@pytest.mark.slow
def test_traces_agree_with_the_samples(content):
    from bass_jax.decoding import read_trace

    content |= {"trace": True, "methods": {"batched": {"batch": 4, "draft_len": 2}}}
    path = run(content)
    runs = read_trace(path / "trace-batched.jsonl")
    assert len(runs) == 4
    emitted = sum(sum(step["num_emitted"]) for one in runs for step in one.steps)
    assert emitted == sum(sample["num_tokens"] for sample in written(path))


def test_processes_share_whole_groups(content):
    plan = make_plan(parse_experiment(content | {"seeds": [0, 1], "repeats": 2}), num_problems=5)
    shares = [share_of(plan, process, 3) for process in range(3)]
    assert sorted(batch.key for share in shares for batch in share) == sorted(batch.key for batch in plan)
    groups = [{batch.key[:4] for batch in share} for share in shares]
    assert not groups[0] & groups[1] and not groups[1] & groups[2] and not groups[0] & groups[2]


def test_row_seeds_differ(content):
    plan = make_plan(parse_experiment(content | {"seeds": [0, 1, 2]}), num_problems=200)
    seeds = {(batch.seed, row): row_seed(batch.seed, row) for batch in plan for row in batch.rows}
    assert len(set(seeds.values())) == len(seeds) == 3 * 200 * 4


@pytest.mark.slow
def test_two_processes_write_the_samples_of_one(content, tmp_path):
    """Each decodes some of the problems into files of its own."""
    alone = tokens(run(content, output_dir=str(tmp_path / "alone")))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "bass_jax.cli.main", "run", str(config), "--quiet", "--distributed"]
    command += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    processes = [subprocess.Popen([*command, str(index)], env=environment) for index in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    path = Path(content["output_dir"])
    assert {file.name for file in path.glob("samples*")} == {"samples-0.jsonl", "samples-1.jsonl"}
    assert tokens_whole(path) == alone
