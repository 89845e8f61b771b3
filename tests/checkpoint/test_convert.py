"""A conversion that is killed goes on, and believes neither its source nor itself without their hashes."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from bass_jax.checkpoint import Tokenizer, convert, load_model, load_tokenizer, orbax, save, save_hugging_face
from bass_jax.checkpoint import convert as conversion
from bass_jax.runtime.trees import flatten, unflatten
from tests.checkpoint.small import random_model, small_tokenizer

ROOT = Path(__file__).parents[2]


class Stop(BaseException):
    """As a signal would."""


@pytest.fixture
def source(tmp_path, model, tokenizer):
    save_hugging_face(tmp_path / "source", model, tokenizer=tokenizer)
    return tmp_path / "source"


def stop_after(count):
    def progress(done, total):
        if done == count:
            raise Stop

    return progress


@pytest.fixture
def built(monkeypatch):
    """Names of the tensors that were made, in order."""
    names, write = [], conversion._Pieces.write

    def counting(self, name, array):
        names.append(name)
        write(self, name, array)

    monkeypatch.setattr(conversion._Pieces, "write", counting)
    return names


def stopped(source, destination, count=5):
    with pytest.raises(Stop):
        convert(source, destination, progress=stop_after(count))
    assert not destination.exists()
    return destination.with_name(f".{destination.name}.converting")


def test_a_stopped_run_goes_on(source, tmp_path, model, tokenizer, same, built):
    ours = tmp_path / "ours"
    stopped(source, ours)
    first = list(built)
    assert len(first) == 5
    calls = []
    convert(source, ours, progress=lambda *call: calls.append(call))
    num_tensors = len(jax.tree.leaves(model.params))
    assert len(built) == len(set(built)) == num_tensors
    assert calls == [(i + 1, num_tensors) for i in range(num_tensors)]
    same(load_model(ours), model)
    assert load_tokenizer(ours) == tokenizer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"]


def test_a_source_that_changed_is_read_anew(source, tmp_path, model, same, built):
    ours = tmp_path / "ours"
    stopped(source, ours)
    other = random_model(model.config, 5)
    save_hugging_face(tmp_path / "new", other)
    (tmp_path / "new" / "model.safetensors").replace(source / "model.safetensors")
    convert(source, ours)
    same(load_model(ours), other)
    assert len(built) == 5 + len(jax.tree.leaves(model.params))


def test_another_dtype_is_another_conversion(source, tmp_path, built):
    stopped(source, tmp_path / "ours")
    convert(source, tmp_path / "ours", dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(load_model(tmp_path / "ours").params)} == {"bfloat16"}


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "journal"])
def test_what_a_stopped_run_left_is_checked(source, tmp_path, model, same, built, damage):
    work = stopped(source, tmp_path / "ours")
    file = sorted(work.glob("tensor-*"))[0]
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "delete":
        file.unlink()
    else:
        journal = work / "journal.jsonl"
        journal.write_text(journal.read_text()[:-20])  # The last line was being written.
    convert(source, tmp_path / "ours")
    same(load_model(tmp_path / "ours"), model)
    assert len(built) == 1 + len(jax.tree.leaves(model.params))


def test_an_error_leaves_nothing(source, tmp_path):
    work = stopped(source, tmp_path / "ours")
    assert work.is_dir()
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not readable as safetensors"):
        convert(source, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_hubs_cache_is_checked_by_its_names(source, tmp_path, model, same):
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
@pytest.mark.parametrize("wrong", ["bit", "shape", "dtype", "lost", "more", "config", "tokenizer"])
def test_what_was_written_is_read_back(source, tmp_path, model, tokenizer, same, monkeypatch, kind, wrong):
    """The hashes in a manifest are of the files that are there: they say nothing of what should have been written."""
    if kind == "ours":
        convert(source, tmp_path / "first")
        source = tmp_path / "first"
    before = sorted(path.name for path in tmp_path.iterdir())
    write, write_config = orbax.write_arrays, save.config_file.write_config

    def write_arrays(directory, tree):
        flat = {name: np.array(leaf) for name, leaf in flatten(tree).items()}
        name = "params/layer_1/attention/qkv"
        if wrong == "bit":
            flat[name].reshape(-1).view(np.uint8)[77] ^= 1
        elif wrong == "shape":
            flat[name] = flat[name][..., :-1]
        elif wrong == "dtype":
            flat[name] = flat[name].astype(np.float16)
        elif wrong == "lost":
            del flat[name]
        elif wrong == "more":
            flat["params/layer_1/attention/another"] = flat[name]
        write(directory, unflatten(flat))

    def write_changed(directory, config):
        write_config(directory, dataclasses.replace(config, context=8) if wrong == "config" else config)

    saving = Tokenizer.save
    with monkeypatch.context() as patch:
        patch.setattr(orbax, "write_arrays", write_arrays)
        patch.setattr(save.config_file, "write_config", write_changed)
        if wrong == "tokenizer":
            patch.setattr(Tokenizer, "save", lambda _, directory: saving(small_tokenizer("e h"), directory))
        tensor = "tensor 'params/layer_1/attention/(qkv|another)'"
        what = {"config": "the configuration", "tokenizer": "the tokenizer"}.get(wrong, tensor)
        with pytest.raises(ValueError, match=f"{what} was written wrongly"):
            convert(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    convert(source, tmp_path / "ours")
    same(load_model(tmp_path / "ours"), model)


def test_a_killed_process_leaves_no_part_and_the_next_goes_on(source, tmp_path, model, same, built):
    """Killed, not interrupted: nothing in the process can tidy up."""
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
    assert len(built) <= len(jax.tree.leaves(model.params)) - 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "source"]


def test_one_at_a_time(source, tmp_path, model, same):
    """A second process waits, and leaves what the first has put there if it was told so."""
    ours = tmp_path / "ours"
    code = "import sys; from bass_jax.checkpoint import convert; convert(*sys.argv[1:], replace=False)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    waiting = []

    def start_another(done, total):
        if done == 1:
            command = [sys.executable, "-c", code, str(source), str(ours)]
            waiting.append(subprocess.Popen(command, env=environment))
        time.sleep(0.02)

    convert(source, ours, progress=start_another)
    written = (ours / "manifest.json").stat().st_mtime_ns
    assert waiting[0].wait(300) == 0
    assert (ours / "manifest.json").stat().st_mtime_ns == written
    same(load_model(ours), model)
    manifest = json.loads((ours / "manifest.json").read_text())
    assert manifest["source"] == str(source)
