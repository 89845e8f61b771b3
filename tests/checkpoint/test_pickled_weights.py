"""Weights that torch pickled are read without torch, and nothing that their pickle names is ever run."""

import os
import pickle
import shutil
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from bass_jax.checkpoint import load_model
from bass_jax.checkpoint.torch_file import TorchFile
from tests.checkpoint import torch_writer
from tests.checkpoint.torch_writer import archive, integer, numbers, pickled, tensor, text

ONES = np.ones((2, 3), np.float32)


@pytest.fixture
def directory(originals, tmp_path):
    """The configuration of the small model, and its tensors; the weights are for the test to write."""
    shutil.copytree(originals / "theirs", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path / "model", tensors


def test_one_file(directory, model, same):
    path, tensors = directory
    torch_writer.write_torch(path / "pytorch_model.bin", tensors)
    same(load_model(path), model)
    # A mask that old checkpoints carry is no weight, and does not decide the dtype.
    mask = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, bool)}
    halved = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    torch_writer.write_torch(path / "pytorch_model.bin", halved | mask)
    assert load_model(path).params["embedding"].dtype == jnp.bfloat16


def test_shards(checkpoint, model, same):
    path = checkpoint / "pickled"
    same(load_model(path), model)
    (path / "pytorch_model-1.bin").unlink()
    with pytest.raises(ValueError, match=r"index.json: names pytorch_model-1.bin, which is missing"):
        load_model(path)


def test_safetensors_come_first(directory, model, same, originals):
    path, _ = directory
    (path / "pytorch_model.bin").write_bytes(b"never looked at")
    shutil.copy(originals / "theirs" / "model.safetensors", path)
    same(load_model(path), model)


def test_transposed_and_shared_views(tmp_path):
    turned = np.arange(12, dtype=np.float32).reshape(3, 4).T
    items = {"turned": tensor("0", turned), "whole": tensor("0", np.empty(12, np.float32))}
    (tmp_path / "w.bin").write_bytes(archive(pickled(items), {"0": np.ascontiguousarray(turned.T).tobytes()}))
    file = TorchFile(tmp_path / "w.bin")
    np.testing.assert_array_equal(file.read("turned"), turned)
    np.testing.assert_array_equal(file.read("whole"), np.arange(12))
    assert not file.read("whole").flags.writeable


class Touch:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


GLOBAL = "may run code and is not read$"
REFUSED = {
    "any name": (b"\x80\x02}" + text("a") + b"cos\nsystem\n" + b"s.", rf"the pickle names os.system, .*{GLOBAL}"),
    "torch's own": (b"ctorch\nload\n.", rf"names torch.load, .*{GLOBAL}"),
    "a name from the stack": (b"\x80\x04" + text("builtins") + text("eval") + b"\x93.", rf"builtins.eval, .*{GLOBAL}"),
    "an instance": (b"(ios\nsystem\n.", "the pickle uses INST"),
    "an object": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "the pickle uses NEWOBJ"),
    "an extension": (b"\x80\x02\x82\x01.", "the pickle uses EXT1"),
    "state of a tensor": (b"\x80\x02}(" + text("a") + tensor("0", ONES) + b"}bu.", "sets the state of what is no dict"),
    "a dict called with arguments": (b"ccollections\nOrderedDict\n(K\x01tR.", "calls what it should not"),
    "a storage called": (b"ctorch\nFloatStorage\n)R.", "calls what it should not"),
    "no tensors": (b"\x80\x02K\x05.", "expected tensors by name, and nothing else"),
    "another value": (pickled({"a": integer(3)}), "expected tensors by name"),
    "no end": (pickled({})[:-1], "damaged pickle"),
    "nothing on the stack": (b"\x80\x02\x85.", "damaged pickle: a value is missing"),
    "a memo that is not there": (b"\x80\x02h\x07.", "damaged pickle"),
    "another storage": (pickled({"a": tensor("9", ONES)}), "storage 'archive/data/9' is missing"),
    "too few bytes": (pickled({"a": tensor("0", ONES, 7)}), "storage 'archive/data/0': 24 bytes, expected 28"),
    "past its storage": (pickled({"a": tensor("0", ONES, 5)}), "tensor 'a' reaches past its storage of 5 numbers"),
    "one number again and again": (
        pickled({"a": tensor("0", np.broadcast_to(np.float32(1), (99, 3)), 6)}),
        "tensor 'a' reaches past its storage of 6 numbers",
    ),
    "another length of one storage": (
        pickled({"a": tensor("0", ONES, 7), "b": tensor("0", ONES)}), "24 bytes, expected 28"
    ),
    "negative strides": (
        pickled({"a": tensor("0", ONES)}).replace(numbers((3, 1)), numbers((-3, 1))),
        r"tensor 'a': shape \[2, 3\], strides \[-3, 1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_weights_do_not_need_is_refused(case, directory):
    path, _ = directory
    content, message = REFUSED[case]
    (path / "pytorch_model.bin").write_bytes(archive(content, {"0": ONES.tobytes()}))
    with pytest.raises(ValueError, match=f"pytorch_model.bin: .*{message}") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_pickle_with_code_does_not_run(directory, tmp_path):
    path, _ = directory
    for content in (pickle.dumps({"a": Touch(tmp_path / "pwned")}, protocol) for protocol in range(6)):
        for file in (content, archive(content, {})):
            (path / "pytorch_model.bin").write_bytes(file)
            with pytest.raises(ValueError, match=r"pytorch_model.bin: "):
                load_model(path)
    assert not (tmp_path / "pwned").exists()


def test_archives_that_torch_does_not_write(directory):
    path, _ = directory
    weights, whole = path / "pytorch_model.bin", pickled({"a": tensor("0", ONES)})
    for content, message in (
        (b"", "expected the zip archive that torch writes since 1.6"),
        (pickle.dumps({}), "expected the zip archive"),
        (archive(whole, {"0": ONES.tobytes()})[:-30], "expected the zip archive"),
        (archive(whole, {"0": bytes(1000)}, zipfile.ZIP_DEFLATED), "its pickle is compressed"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=f"pytorch_model.bin: .*{message}"):
            load_model(path)
