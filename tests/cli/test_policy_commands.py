"""Profile, trace, simulation and policies from the command line; each reads the output of the one before."""

import json

import pytest

from bass_jax.analysis import profiler
from bass_jax.cli.main import main
from bass_jax.decoding.traces import read_trace
from tests.cli.test_commands import fails, pair  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def files(pair, tmp_path_factory):  # noqa: F811
    """A profile and a trace, as a user makes them."""
    folder = tmp_path_factory.mktemp("files")
    prompts = folder / "prompts.txt"
    prompts.write_text("one\nthe other\nand a third\n")
    patch = pytest.MonkeyPatch()
    patch.setattr(profiler, "SECONDS_PER_CELL", 0.0)
    profile = ["profile", pair, "--prompts", str(prompts), "--max-new-tokens", "8", "--batches", "2"]
    profile += ["--draft-lens", "0,2", "--contexts", "20", "--output", str(folder / "profile.json")]
    code = main([*profile, "--plot", str(folder / "fit.png")])
    patch.undo()
    assert code == 0
    trace = ["generate", "--file", str(prompts), "--pair", pair, "--batch", "2", "--draft-len", "2", "--quiet"]
    trace += ["--max-new-tokens", "10", "--exhaustive", "--trace", str(folder / "trace.jsonl")]
    assert main(trace) == 0
    return folder, prompts, trace


@pytest.mark.slow
def test_profile_writes_and_draws(files):
    folder, *_ = files
    record = json.loads((folder / "profile.json").read_text())
    assert {"synergy", "roofline", "errors"} == set(record["fitted"])
    assert (folder / "fit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_interrupted_trace_is_resumed(files, capsys):
    folder, _, trace = files
    path = folder / "trace.jsonl"
    whole = read_trace(path)
    assert [run.about["first_row"] for run in whole] == [0, 2]
    text = path.read_text()
    path.write_text(text[: len(text) - 30])
    assert main(trace) == 0
    assert [run.about["first_row"] for run in read_trace(path)] == [0, 2]
    assert [[step["num_accepted"] for step in run.steps] for run in read_trace(path)] == [
        [step["num_accepted"] for step in run.steps] for run in whole
    ]
    capsys.readouterr()
    assert main(trace) == 0
    assert "holds all batches already" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_simulate_prints_every_policy(files, capsys):
    folder, *_ = files
    arguments = ["simulate", str(folder / "trace.jsonl"), "--profile", str(folder / "profile.json"), "--batch", "2"]
    assert main([*arguments, "--fixed", "0,2", "--policy", "auto", "--policy", "bass_heuristic(limit=8)"]) == 0
    printed = capsys.readouterr().out
    for name in ("oracle", "fixed 0", "fixed 2", "auto", "bass_heuristic(limit=8)", "1.000", "regret"):
        assert name in printed


@pytest.mark.slow
def test_generate_with_a_policy_and_forced_acceptance(pair, files, capsys):  # noqa: F811
    folder, *_ = files
    common = ["generate", "one", "--pair", pair, "--max-new-tokens", "12", "--draft-len", "2", "--no-text"]
    assert (
        main([*common, "--policy", "auto(lengths=(0, 2))", "--profile", str(folder / "profile.json"), "--baseline"])
        == 0
    )
    assert "1 of 1 rows identical" in capsys.readouterr().out
    assert main([*common, "--synthetic-acceptance", "1.0"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "acceptance='synthetic(1.0)' is synthetic" in printed
    assert "3.00" in printed  # tokens per pass: two drafts and one more


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", "a", "--policy", "nonesuch"], "policy='nonesuch'"),
        (["generate", "a", "--policy", "batch_table"], "expected a profile"),
        (["generate", "a", "--exhaustive"], "--exhaustive: expected --trace"),
        (["generate", "a", "--synthetic-acceptance", "high"], "expected numbers"),
        (["generate", "a", "--synthetic-acceptance", "1.5"], "expected numbers from 0 to 1"),
        (["generate", "a", "--synthetic-acceptance", "0.5", "--acceptance", "block"], "--synthetic-acceptance"),
        (["profile", "nowhere", "--batches", "4,1"], "--batches: 4,1"),
        (["profile", "nowhere", "--contexts", "x"], "--contexts: x"),
        (["simulate", "nowhere.jsonl", "--device", "h200"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert message in fails(capsys, *arguments)


@pytest.mark.parametrize("options, message", [([], "expected --profile"), (["--device", "tpu"], "--device tpu")])
def test_simulate_needs_costs(capsys, options, message):
    assert message in fails(capsys, "simulate", "trace.jsonl", *options)
