"""`convert` checks its source, verifies what it wrote, and leaves no files if it fails."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bass_jax.checkpoint import Tokenizer, convert, load_model, save, save_hugging_face
from tests.checkpoint.small import small_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path, model, tokenizer):
    save_hugging_face(tmp_path / "source", model, tokenizer=tokenizer)
    return tmp_path / "source"


def test_an_interrupted_run_leaves_no_files(source, tmp_path):
    def interrupt(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "ours", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_failed_run_leaves_no_files(source, tmp_path):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not readable as safetensors"):
        convert(source, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_files_of_the_hubs_cache_must_have_the_hash_in_their_name(source, tmp_path, model, same):
    weights = source / "model.safetensors"
    content = weights.read_bytes()
    blob = tmp_path / hashlib.sha256(content).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    convert(source, tmp_path / "ours")
    same(load_model(tmp_path / "ours"), model)
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"model.safetensors: damaged: its sha256 is .*, the Hub says {blob.name}"):
        convert(source, tmp_path / "again")


@pytest.mark.parametrize("kind", ["theirs", "ours"])
@pytest.mark.parametrize("wrong", ["bit", "shape", "dtype", "missing", "extra", "config", "tokenizer"])
def test_a_wrongly_written_checkpoint_is_refused(source, tmp_path, model, tokenizer, same, monkeypatch, kind, wrong):
    """The hashes in a manifest do not detect this, because they are computed from the files as written."""
    if kind == "ours":
        convert(source, tmp_path / "first")
        source = tmp_path / "first"
    before = sorted(path.name for path in tmp_path.iterdir())
    write, write_config = save.write_safetensors, save.write_config_json

    def write_wrongly(path, shapes, build):
        arrays = {name: np.array(build(name)) for name in shapes}
        name = "layer_1/attention/qkv"
        if wrong == "bit":
            arrays[name].reshape(-1).view(np.uint8)[77] ^= 1
        elif wrong == "shape":
            arrays[name] = arrays[name][..., :-1]
        elif wrong == "dtype":
            arrays[name] = arrays[name].astype(np.float16)
        elif wrong == "missing":
            del arrays[name]
        elif wrong == "extra":
            arrays["layer_1/attention/extra"] = arrays[name]
        write(path, arrays, arrays.__getitem__)

    def write_changed(directory, config):
        write_config(directory, dataclasses.replace(config, context=8) if wrong == "config" else config)

    saving = Tokenizer.save
    with monkeypatch.context() as patch:
        patch.setattr(save, "write_safetensors", write_wrongly)
        patch.setattr(save, "write_config_json", write_changed)
        if wrong == "tokenizer":
            patch.setattr(Tokenizer, "save", lambda _, directory: saving(small_tokenizer("e h"), directory))
        tensor = "tensor 'layer_1/attention/(qkv|extra)'"
        what = {"config": "the configuration", "tokenizer": "the tokenizer"}.get(wrong, tensor)
        with pytest.raises(ValueError, match=f"{what} differs when it is read back"):
            convert(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    convert(source, tmp_path / "ours")
    same(load_model(tmp_path / "ours"), model)


def test_the_next_run_deletes_what_a_killed_run_left(source, tmp_path, model, same):
    """The process is killed, so that it cannot delete its temporary directory."""
    code = """
import sys, time
from bass_jax.checkpoint import convert
convert(*sys.argv[1:], progress=lambda done, total: (print(done, flush=True), time.sleep(0.05)))
"""
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "ours")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 4:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "ours").exists()
    convert(source, tmp_path / "ours")
    same(load_model(tmp_path / "ours"), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"]


@pytest.mark.slow
@pytest.mark.parametrize("replace", [False, True])
def test_two_processes_can_convert_to_one_destination(source, tmp_path, model, same, replace):
    """The checkpoint that another process writes in the meantime is kept or replaced; the result is complete."""
    ours = tmp_path / "ours"
    code = f"import sys; from bass_jax.checkpoint import convert; convert(*sys.argv[1:], replace={replace})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    written = []

    def run_another(done, total):
        if done == 1:
            subprocess.run([sys.executable, "-c", code, str(source), str(ours)], env=environment, check=True)
            written.append((ours / "manifest.json").stat().st_mtime_ns)

    convert(source, ours, replace=replace, progress=run_another)
    assert ((ours / "manifest.json").stat().st_mtime_ns == written[0]) == (not replace)
    same(load_model(ours), model)
    assert json.loads((ours / "manifest.json").read_text())["source"] == str(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"]
