"""The command line: what it writes, and one line with exit code 2 for a mistake."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bass_jax import checkpoint
from bass_jax.cli.main import main
from tests.checkpoint.small import random_model, small_config, small_tokenizer

COMMON = ("--draft", "ngram", "--draft-len", "2", "--max-new-tokens", "8", "--quiet")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> str:
    """A pair's directory with a target, a draft of half its depth, and a tokenizer."""
    directory = tmp_path_factory.mktemp("pair")
    tokenizer = small_tokenizer()
    options = {"tokenizer": tokenizer, "source": "random", "license": "none"}
    checkpoint.save_model(directory / "target", random_model(small_config()), **options)
    checkpoint.save_model(directory / "draft", random_model(small_config(num_layers=1)), **options)
    entries = {"target": {"path": "target"}, "draft": {"path": "draft"}}
    (directory / "manifest.json").write_text(json.dumps(entries))
    return str(directory)


def fails(capsys, *arguments: str) -> str:
    """Runs the command, asserts one line and exit code 2, and returns the line."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    return error


def test_the_demo_compares_every_batch_size(pair, tmp_path, capsys):
    """With the defaults of speculation; both ways decode the same prompts to the same tokens."""
    prompts, plot = tmp_path / "prompts.txt", tmp_path / "demo.svg"
    prompts.write_text("one\nthe other\nand a third\n")
    options = ("--pair", pair, "--file", str(prompts), "--plot", str(plot), "--max-new-tokens", "6")
    assert main(["demo", *options, "--batches", "1,2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" identical") == 2 and "NOT" not in printed
    assert printed.count("speculative █") == printed.count("regular █") == 2
    assert "<svg" in plot.read_text()
    assert "nowhere.txt" in fails(capsys, "demo", "--pair", pair, "--file", "nowhere.txt")


def test_writes_a_line_per_answer(pair, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    arguments = ("--pair", pair, *COMMON, "--samples", "2", "--temperature", "1", "--output", str(output))
    assert main(["generate", "one", "the other", *arguments]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted((row["prompt_index"], row["sample"]) for row in rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {row["prompt"] for row in rows} == {"one", "the other"}
    assert all(len(row["tokens"]) == 8 or row["finish_reason"] == "stop" for row in rows)
    printed = capsys.readouterr().out
    assert all(
        row["text"].strip()[:20] in printed for row in rows if row["text"].isascii() and row["text"].isprintable()
    )


def ban_token_5(logits, tokens, position):
    """A logits processor that is named on the command line."""
    return logits.at[5].set(-float("inf"))


def test_sampling_parameters_reach_the_decoder(pair, tmp_path, capsys):
    """Candidates, bans, processors, minimum length and log-probabilities together."""
    output = tmp_path / "answers.jsonl"
    arguments = (
        *("--pair", pair, "--quiet", "--draft-len", "2", "--max-new-tokens", "8", "--output", str(output)),
        *("--acceptance", "multi_draft", "--candidates", "2", "--temperature", "1.5", "--samples", "4"),
        *("--ban", "3", "--ban", "4", "--repetition-penalty", "1.2", "--frequency-penalty", "0.5"),
        *("--min-new-tokens", "8", "--logprobs", "2", "--logits-processor", "tests.cli.test_commands:ban_token_5"),
    )
    assert main(["generate", "one", *arguments]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 4
    for record in records:
        assert len(record["tokens"]) == 8 and not {3, 4, 5} & set(record["tokens"])
        assert [len(top) for top in record["logprobs"]["warped_top_tokens"]] == [2] * 8
        assert all(value is not None and value <= 0 for value in record["logprobs"]["warped"])
    assert "lossy" not in capsys.readouterr().out


def test_seeds_do_not_depend_on_the_batch(pair, tmp_path):
    """The seeds count over all batches, and rows do not depend on each other."""
    texts = []
    for batch in ("1", "3"):
        output = tmp_path / f"{batch}.jsonl"
        arguments = ("--pair", pair, *COMMON, "--temperature", "1", "--seed", "5", "--batch", batch)
        assert main(["generate", "a", "b", "c", *arguments, "--output", str(output)]) == 0
        rows = sorted(map(json.loads, output.read_text().splitlines()), key=lambda row: row["prompt_index"])
        texts.append([row["tokens"] for row in rows])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("draft", ["draft_model", "ngram"])
def test_baseline_compares_greedy_outputs(pair, capsys, draft):
    arguments = ("--pair", pair, "--draft", draft, "--max-new-tokens", "12", "--baseline", "--no-text")
    assert main(["generate", "one", "the other", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 rows identical" in printed
    for label in ("tokens per pass", "acceptance", "PTL first", "PTL last", "PTL all", "tokens/s", "speed-up"):
        assert label in printed


def test_reads_prompts_from_files_and_standard_input(pair, tmp_path, monkeypatch, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text('{"turns": ["first", "second"]}\n\n{"turns": ["third"]}\n')
    lines = tmp_path / "prompts.txt"
    lines.write_text("fourth\n\nfifth\n")
    output = tmp_path / "out.jsonl"

    def prompts(*arguments):
        assert main(["generate", *arguments, "--pair", pair, *COMMON, "--batch", "1", "--output", str(output)]) == 0
        rows = map(json.loads, output.read_text().splitlines())
        return [row["prompt"] for row in sorted(rows, key=lambda row: row["prompt_index"])]

    assert prompts("--file", str(data), "--field", "turns", "--template", "Q: {prompt}") == ["Q: first", "Q: third"]
    assert prompts("--file", str(lines), "--limit", "1") == ["fourth"]
    monkeypatch.setattr("sys.stdin", io.StringIO(lines.read_text()))
    assert prompts("zero", "-") == ["zero", "fourth", "fifth"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "x", "--no-such-option"), ("--no-such-option",)),
        (("generate", "x", "--draft-len", "many"), ("--draft-len", "many")),
        (("generate", "x", "--draft-len", "33"), ("draft_len=33", "0 to 32")),
        (("generate", "x", "--temperature", "-1"), ("temperature=-1", "at least 0")),
        (("generate", "x", "--top-p", "0"), ("top_p=0",)),
        (("generate", "x", "--acceptance", "hopeful"), ("hopeful", "greedy")),
        (("generate", "x", "--draft", "no/such/draft"), ("no/such/draft",)),
        (("generate", ""), ("prompt 0 is empty",)),
        (("generate", "x", "--samples", "0"), ("--samples 0",)),
        (("generate", "x", "--template", "nothing"), ("--template", "{prompt}")),
        (("generate", "x" * 300), ("prompts[0]", "context is 128")),
        (("generate", "--file", "no-such-file.txt"), ("no-such-file.txt",)),
        (("generate", "x", "--max-new-tokens", "8", "--output", "/no/such/place.jsonl"), ("/no/such/place.jsonl",)),
        (("generate", "x", "--seed", "-1"), ("--seed -1",)),
        (("speculate",), ("speculate",)),
        (("distill", "no-such.yaml"), ("no-such.yaml",)),
        (("distill", "x.yaml", "--set", "training"), ("--set 'training'", "PATH=VALUE")),
        ((), ("COMMAND",)),
    ],
)
def test_mistakes_are_one_line(pair, capsys, arguments, words):
    if arguments[:1] == ("generate",):
        arguments = (*arguments, "--pair", pair)
    line = fails(capsys, *arguments)
    assert all(word in line for word in words), line


def test_unreadable_data_names_file_and_line(pair, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "fine"}\n{"prompt": \n')
    assert "data.jsonl:2" in fails(capsys, "generate", "--file", str(data), "--pair", pair)
    data.write_text('{"prompt": "fine"}\n{"question": "?"}\n')
    assert "no field 'prompt'" in fails(capsys, "generate", "--file", str(data), "--pair", pair)
    compressed = tmp_path / "data.jsonl.gz"
    compressed.write_bytes(b"\x1f\x8b not gzip")
    assert "data.jsonl.gz" in fails(capsys, "generate", "--file", str(compressed), "--pair", pair)


def test_unusable_checkpoints_are_refused(pair, tmp_path, capsys):
    assert "no/such/pair" in fails(capsys, "generate", "x", "--pair", "no/such/pair")

    other = tmp_path / "other"
    model = random_model(small_config(num_layers=1))
    checkpoint.save_model(other, model, tokenizer=small_tokenizer("a b"), source="random", license="none")
    assert "tokenizer" in fails(capsys, "generate", "x", "--pair", pair, "--draft", str(other))

    hugging_face = tmp_path / "model"
    checkpoint.save_hugging_face(hugging_face, random_model(small_config()), tokenizer=small_tokenizer())
    weights = hugging_face / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    destination = tmp_path / "converted"
    assert "model.safetensors" in fails(capsys, "convert", str(hugging_face), str(destination))
    assert not destination.exists()


def test_convert_makes_a_target(pair, tmp_path, capsys):
    source, destination = tmp_path / "model", tmp_path / "converted"
    checkpoint.save_hugging_face(source, random_model(small_config()), tokenizer=small_tokenizer())
    assert main(["convert", str(source), str(destination), "--quiet"]) == 0
    assert main(["generate", "x", "--pair", str(destination), *COMMON]) == 0
    foreign = tmp_path / "notes"
    foreign.mkdir()
    (foreign / "diary.txt").write_text("another file")
    assert "notes" in fails(capsys, "convert", str(source), str(foreign))
    assert (foreign / "diary.txt").exists()


def test_inspect_describes_and_compares(pair, tmp_path, capsys):
    target, draft = f"{pair}/target", f"{pair}/draft"
    assert main(["inspect", target, "--draft", draft, "--shapes"]) == 0
    printed = capsys.readouterr().out
    for word in ("llama", "264", "256 bytes per token", "layer_1/attention/qkv: 4 x 3 x 4 x 16", "They can be a pair"):
        assert word in printed
    other = tmp_path / "other"
    model = random_model(small_config(num_layers=1))
    checkpoint.save_model(other, model, tokenizer=small_tokenizer("a b"), source="random", license="none")
    assert main(["inspect", target, "--draft", str(other)]) == 1
    assert "cannot be a pair: the draft's tokenizer" in capsys.readouterr().out
    assert "no/such/model" in fails(capsys, "inspect", "no/such/model")


def test_inspect_describes_presets(capsys):
    assert main(["inspect", "codegen-350m", "--draft", "bass-draft-a-310m"]) == 0
    printed = capsys.readouterr().out
    assert "356,712,448 in bfloat16" in printed and "306,294,784" in printed and "They can be a pair." in printed


def test_a_killed_run_leaves_readable_rows(pair, tmp_path):
    """Every output is written and flushed when it has finished."""
    output = tmp_path / "answers.jsonl"
    data = tmp_path / "data.txt"
    data.write_text("".join(f"prompt number {number}\n" for number in range(20000)))
    command = [sys.executable, "-m", "bass_jax.cli.main", "generate", "--pair", pair, "--file", str(data)]
    command += ["--batch", "1", *COMMON, "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if output.exists() and output.read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = output.read_text().split("\n")[:-1]
    rows = [json.loads(line) for line in whole]
    assert len(rows) >= 3
    assert [row["prompt_index"] for row in rows] == list(range(len(rows)))


@pytest.mark.parametrize("command", ["generate", "convert", "inspect", "distill"])
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  bass-jax {command} " in capsys.readouterr().out
