"""Weights that torch pickled are read, and no code of their pickles is run."""

import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from bass_jax.checkpoint import load_model
from tests.checkpoint.npz_file import write_npz
from tests.models.conftest import PEERS_PYTHON, ROOT


@pytest.fixture
def directory(originals, tmp_path):
    """Writes the small model without its weights; returns the directory and the tensors."""
    shutil.copytree(originals / "theirs", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path / "model", tensors


def test_one_file_is_read(directory, model, same, npz_for_torch):
    path, tensors = directory
    write_npz(path / "pytorch_model.bin", tensors)
    same(load_model(path), model)
    # The masks in old checkpoints are not weights and do not determine the dtype.
    mask = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, bool)}
    halved = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    write_npz(path / "pytorch_model.bin", halved | mask)
    assert load_model(path).params["embedding"].dtype == jnp.bfloat16


def test_shards_are_read(checkpoint, model, same, npz_for_torch):
    path = checkpoint / "pickled"
    same(load_model(path), model)
    (path / "pytorch_model-1.bin").unlink()
    with pytest.raises(ValueError, match=r"index.json: names pytorch_model-1.bin, which is missing"):
        load_model(path)


def test_safetensors_are_preferred(directory, model, same, originals):
    path, _ = directory
    (path / "pytorch_model.bin").write_bytes(b"not read")
    shutil.copy(originals / "theirs" / "model.safetensors", path)
    same(load_model(path), model)


def test_without_torch_the_error_contains_the_command_that_installs_it(directory, monkeypatch):
    path, _ = directory
    (path / "pytorch_model.bin").write_bytes(b"not read")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"pytorch_model.bin: .* needs torch: pip install 'bass-jax\[torch\]'$"):
        load_model(path)


@pytest.mark.peer
def test_files_of_torch_are_read_and_a_pickle_with_code_is_not_run(tmp_path):
    """Runs the reader in the peers environment, because torch is not installed in this one."""
    if not PEERS_PYTHON.exists():
        pytest.skip("no environment with torch at .venv-peers (make peers)")
    script = ROOT / "tests" / "checkpoint" / "torch_reader.py"
    result = subprocess.run([str(PEERS_PYTHON), str(script), str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected = {
        "plain": ("F32", matrix + 0.5),
        "transposed": ("F32", matrix.T),
        "part": ("F32", matrix[1:, 2:]),
        "parameter": ("F64", matrix.astype(np.float64)),
        "half": ("F16", matrix.astype(np.float16)),
        "bfloat16": ("BF16", (matrix / 7).astype(ml_dtypes.bfloat16).view(np.uint16)),
        "mask": ("BOOL", matrix > 3),
    }
    assert found["kinds"] == {name: kind for name, (kind, _) in expected.items()}
    with np.load(tmp_path / "weights.npz") as weights:
        for name, (_, array) in expected.items():
            assert weights[name].dtype == array.dtype
            np.testing.assert_array_equal(weights[name], array)
    errors = found["errors"]
    assert not [error for error in errors.values() if error and ("\n" in error or str(tmp_path) not in error)]
    assert errors.pop("weights") is None and errors.pop("module") is None
    assert errors.pop("code").endswith("it may run code and is not read")
    for name in ("list", "value"):
        assert errors.pop(name).endswith("expected tensors by name, and nothing else")
    assert errors and all("not readable as weights of torch" in error for error in errors.values())
    assert not (tmp_path / "pwned").exists()
