"""Runs the code blocks of README.md and of the pages in docs as tests.

The blocks of a page run in order, in one namespace and in a temporary directory, whose ``checkpoints/quickstart`` is a
tiny random pair. Blocks of Python run with fewer new tokens. The ``bass-jax`` commands of shell blocks are parsed, and
files, Make targets and modules that a command names must exist. Blocks of YAML are read as configurations.

An HTML comment that begins with ``invisible-code: python`` is a block that readers do not see, and
``<!-- skip: next "reason" -->`` skips a block.
"""

import argparse
import atexit
import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = Path(__file__).parents[1]
USER_FILES = ("HumanEval.jsonl.gz", "gsm8k_test.jsonl", "my_draft.yaml", "prompts.txt", "spec_bench_question.jsonl")
"""Files that commands name and that the pages tell the reader to write or to get."""
FILE_NAME = re.compile(r"[\w./-]+\.(txt|jsonl|jsonl\.gz|yaml|json|safetensors|gguf)")
SLOW_PAGES = ("docs/concepts/", "docs/how_to/", "docs/tutorials/")
"""Pages whose blocks of Python are left out by ``make test``."""
INPUT_DIRECTORIES = ("benchmarks", "bass_jax", "configs", "docs", "kernels_pallas", "notebooks", "recipes", "tests")


@functools.cache
def tiny_pair() -> Path:
    """Writes a pair of random models with a byte-level tokenizer, and returns its directory."""
    from bass_jax.checkpoint import save_model
    from tests import tiny
    from tests.checkpoint.small import VOCAB, small_tokenizer

    path, tokenizer = Path(tempfile.mkdtemp(prefix="bass-jax-pair-")), small_tokenizer()
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    tokenizer._fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    shape = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "mlp_width": 32}
    target = tiny.model(1, vocab_size=VOCAB, **shape)
    networks = {
        "target": target,
        "draft": tiny.perturbed(target, 0.1),
        "eagle": tiny.model(7, vocab_size=VOCAB, hidden_width=target.config.width, **shape),
    }
    for name, model in networks.items():
        save_model(path / name, model, tokenizer=tokenizer, source="random", license="Apache-2.0")
    manifest = {name: {"path": name} for name in networks}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def enter_directory(namespace: dict) -> None:
    """Makes the temporary directory of a page the current one."""
    namespace["_before"] = os.getcwd()
    namespace["_directory"] = directory = Path(tempfile.mkdtemp(prefix="bass-jax-page-"))
    (directory / "configs").symlink_to(ROOT / "configs")
    (directory / "checkpoints").mkdir()
    (directory / "checkpoints" / "quickstart").symlink_to(tiny_pair())
    os.chdir(directory)


def leave_directory(namespace: dict) -> None:
    """Deletes the temporary directory of a page."""
    os.chdir(namespace["_before"])
    shutil.rmtree(namespace["_directory"])


def run_python(example: Example) -> None:
    """Runs a block with at most 12 new tokens per row."""
    offset = example.parsed.line_offset
    shorter = re.sub(r"max_new_tokens=(\d+)", lambda match: f"max_new_tokens={min(int(match[1]), 12)}", example.parsed)
    example.parsed = type(example.parsed)(shorter, example.parsed.offset, offset)
    PythonEvaluator()(example)


def check_commands(example: Example) -> None:
    """Checks every command of a block."""
    text = example.parsed.replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((place for place, word in enumerate(words) if word in ("&&", "||", "|", ";")), len(words))
            check_command(words[:end], example.namespace.setdefault("_written", set()))
            words = words[end + 1 :]


def check_command(words: list[str], written: set[str]) -> None:
    """Checks one command, and adds the files that it writes to `written`.

    Raises:
        AssertionError: if a command of this project does not accept its arguments, or names what does not exist.
    """
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if not words:
        return
    for word in words:
        if word.split("/")[0] in INPUT_DIRECTORIES and "/" in word:
            assert (ROOT / word).exists(), f"{word} does not exist"
    program, *arguments = words
    if program == "bass-jax":
        options = parse_command(arguments)
        written |= {str(getattr(options, name, None)) for name in ("output", "plot", "trace")}
        for word in filter(FILE_NAME.fullmatch, arguments):
            is_known = word in written or word in USER_FILES or (ROOT / word).exists()
            assert is_known, f"{word} does not exist, and no command before writes it"
    elif program == "make":
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{re.escape(target)}(?= |:)", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, f"there is no module {arguments[1]}"


def parse_command(arguments: list[str]) -> argparse.Namespace:
    """Parses the arguments of ``bass-jax`` without running the command."""
    from bass_jax.cli.main import parser

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            options, rest = parser().parse_known_args(arguments)
    except SystemExit as exit:
        if exit.code != 0:
            raise AssertionError(errors.getvalue()) from None
        return argparse.Namespace()
    is_override = hasattr(options, "overrides") and not any(word.startswith("-") for word in rest)
    assert not rest or is_override, f"bass-jax {shlex.join(arguments)}: unrecognized: {rest}"
    return options


def read_config(example: Example) -> None:
    """Reads a block as the configuration of an experiment, of traffic or of a distillation."""
    from bass_jax.experiments.experiment_config import ExperimentConfig
    from bass_jax.experiments.traffic.traffic_config import TrafficConfig
    from bass_jax.runtime.yaml_config import parse_yaml
    from bass_jax.training import DistillConfig

    content = yaml.safe_load(example.parsed)
    kinds = {"methods": ExperimentConfig, "traffic": TrafficConfig, "prompts": DistillConfig}
    (kind,) = (kind for key, kind in kinds.items() if key in content)
    defaults = {"target": "example"} if kind is DistillConfig else {}
    parse_yaml(kind, defaults | content, "block")


PARSERS = (
    CodeBlockParser("python", run_python),
    CodeBlockParser("bash", check_commands),
    CodeBlockParser("yaml", read_config),
    SkipParser(),
)

_PAGES = Sybil(PARSERS, path=str(ROOT), pattern="*.md", setup=enter_directory, teardown=leave_directory)


def is_slow(item: pytest.Item) -> bool:
    """Returns whether an item is a block of Python on a slow page."""
    example = getattr(item, "example", None)
    return example is not None and item.nodeid.startswith(SLOW_PAGES) and example.region.evaluator is run_python


def collect(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Returns the pytest collector of a page, or None for other files."""
    is_page = file_path == ROOT / "README.md" or file_path.is_relative_to(ROOT / "docs")
    return _PAGES.pytest()(file_path, parent) if is_page else None
