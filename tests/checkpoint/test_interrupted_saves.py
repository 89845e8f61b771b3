"""The next save deletes what a killed save left, and restores a checkpoint that it had moved."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bass_jax.checkpoint import load_model, save, save_model
from tests.checkpoint.small import random_model

ROOT = Path(__file__).parents[2]


def start_save(directory) -> subprocess.Popen:
    """Starts a process that saves to `directory` and does not finish."""
    code = """
import sys, time
from pathlib import Path
from bass_jax.checkpoint.save import replaced
with replaced(Path(sys.argv[1])) as partial:
    (partial / "something").write_text("begun")
    print("begun", flush=True)
    time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, str(directory)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def test_the_files_of_a_killed_save_are_deleted(tmp_path, model, same):
    """The files of a running process and of other checkpoints are kept."""
    process = start_save(tmp_path / "model")
    partial = tmp_path / f".model.partial-{process.pid}"
    others = [tmp_path / name for name in (".model2.partial-1", ".xmodel.partial-1", ".model.partial-1x")]
    try:
        for other in others:
            other.mkdir()
        save_model(tmp_path / "model", model)
        assert (partial / "something").is_file()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert (partial / "something").is_file()
    save_model(tmp_path / "model", model)
    same(load_model(tmp_path / "model"), model)
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "model"])


def test_a_checkpoint_that_a_killed_save_had_moved_is_restored(tmp_path, model, same, monkeypatch):
    save_model(tmp_path / "model", model)
    (tmp_path / "model").rename(tmp_path / ".model.old-1")
    (tmp_path / ".model.partial-1").mkdir()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(save, "write_config_json", fail)
        with pytest.raises(OSError, match="disk full"):
            save_model(tmp_path / "model", random_model(model.config, 9))
    same(load_model(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / ".model.old-1").mkdir()
    save_model(tmp_path / "model", model)
    same(load_model(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
