"""A pair of a few kilobytes on disk, and small data for every task."""

import dataclasses
import functools
import gzip
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from bass_jax import checkpoint
from bass_jax.experiments import load_pairs
from bass_jax.experiments.sandbox import bubblewrap_problem
from tests.checkpoint.small import random_model, small_config, small_tokenizer

HUMANEVAL = [
    {
        "task_id": f"Small/{index}",
        "entry_point": name,
        "prompt": f'def {name}(x):\n    """Returns x {sign} 1."""\n',
        "canonical_solution": f"    return x {sign} 1\n",
        "test": f"def check(candidate):\n    assert candidate(3) == 3 {sign} 1\n",
    }
    for index, (name, sign) in enumerate([("one", "+"), ("two", "-"), ("three", "*")])
]
MBPP = [
    {
        "task_id": 1,
        "text": "Add one.",
        "code": "def f(x):\r\n\treturn x + 1",
        "test_setup_code": "",
        "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
    },
]
GSM8K = [{"question": "What is 1,000 + 1?", "answer": "1,000 + 1 = <<1000+1=1001>>1001\n#### 1,001"}]
SPEC_BENCH = [
    {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]},
    {"question_id": 2, "category": "math", "turns": ["Add."]},
    {"question_id": 3, "category": "qa", "turns": ["Why?"]},
    {
        "question_id": 4,
        "category": "summarization",
        "turns": ["Summarize: A cat sat there all day."],
        "reference": ["A cat sat there."],
    },
]
PROMPTS = [{"prompt": text} for text in ("one two", "three", "the other one", "and so on")]
ROWS = {
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "gsm8k": GSM8K,
    "spec_bench": SPEC_BENCH,
    "prompts": PROMPTS,
    "cnn_dailymail": SPEC_BENCH[3:],
    "xsum": [{"id": "7", "document": "A cat sat there all day.", "summary": "A cat sat there."}],
}


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Skips a test that runs programs where bubblewrap cannot isolate them."""
    if problem := bubblewrap_problem():
        pytest.skip(f"bubblewrap cannot be used: {problem}")


@pytest.fixture(scope="session")
def pair_path(tmp_path_factory) -> str:
    """A target and a draft that is often right: the same weights with noise added."""
    directory = tmp_path_factory.mktemp("experiment_pair")
    target = random_model(small_config(context=512, num_layers=1))
    random = np.random.default_rng(1)
    noisy = jax.tree.map(
        lambda leaf: leaf + 0.02 * random.standard_normal(leaf.shape).astype(np.float32), target.params
    )
    options = {"tokenizer": small_tokenizer(), "source": "random", "license": "none"}
    checkpoint.save_model(directory / "target", target, **options)
    checkpoint.save_model(directory / "draft", dataclasses.replace(target, params=noisy), **options)
    entries = {"target": {"path": "target"}, "draft": {"path": "draft"}}
    (directory / "manifest.json").write_text(json.dumps(entries))
    return str(directory)


@pytest.fixture(scope="module")
def loaded_once():
    """Loads each pair once per module, because a run of a few steps takes less time than loading its pair."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_pairs, "load_pair", functools.cache(load_pairs.load_pair))
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, str]:
    """A file per task."""
    directory = tmp_path_factory.mktemp("data")
    paths = {}
    for name, rows in ROWS.items():
        path = directory / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        paths[name] = str(path)
    return paths


@pytest.fixture
def content(pair_path, data, tmp_path, loaded_once) -> dict:
    """A configuration with regular decoding, single-sequence, batched and synchronized speculation."""
    return {
        "output_dir": str(tmp_path / "run"),
        "pair": {"path": pair_path},
        "task": {"name": "prompts", "data": data["prompts"]},
        "methods": {
            "regular": {"step": "decode", "batch": 4},
            "single": {"batch": 1, "draft_len": 2},
            "batched": {"batch": 4, "draft_len": 2},
            "synchronized": {"step": "synchronized", "batch": 4, "draft_len": 2},
        },
        "num_samples": 4,
        "max_new_tokens": 10,
        "device": "h200",
    }


def written(path: str | Path, name: str = "samples") -> list[dict]:
    """Returns the records of one file of a run directory."""
    return [json.loads(line) for line in (Path(path) / f"{name}.jsonl").read_text().splitlines()]
