"""Our arrays are stored in pieces and read a few at a time; a save that was killed is cleared away by the next."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from bass_jax.checkpoint import load_model, orbax, save, save_model
from tests.checkpoint.small import random_model

ROOT = Path(__file__).parents[2]
SHAPES = [(7,), (1,), (64, 48), (60, 50257 // 29), (3, 5, 7, 11), (509, 4), (32, 509)]
"""Of lengths with many factors, few, or none."""


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(orbax, "_MAX_PIECE", 4096)
    monkeypatch.setattr(orbax, "_MIN_PIECE", 64)


@pytest.fixture
def tree():
    draw = np.random.default_rng(0)
    dtypes = [np.float32, jnp.bfloat16, np.float32, np.float32, jnp.bfloat16, np.float32, np.int32]
    values = zip(SHAPES, dtypes, strict=True)
    return {"a": {f"n{i}": (9 * draw.standard_normal(shape)).astype(dtype) for i, (shape, dtype) in enumerate(values)}}


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("in_flight", [0.0, 0.1, 1.0])
def test_pieces_make_the_tensors(tree, tmp_path, small_pieces, monkeypatch, num_devices, in_flight):
    """Whatever the shards: the bounds of theirs and of the pieces are not the same."""
    monkeypatch.setattr(orbax, "_SHARE_IN_FLIGHT", in_flight)
    orbax.write_arrays(tmp_path, tree)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tp",))

    def place(leaf):
        axes = ["tp" if size % num_devices == 0 else None for size in leaf.shape]
        first = axes.index("tp") if "tp" in axes else len(axes)
        spec = PartitionSpec(*[axis if i == first else None for i, axis in enumerate(axes)])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    found = orbax.read_arrays(tmp_path, jax.tree.map(place, tree))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), b)


def test_a_cast_is_jaxs(tmp_path):
    """Of random bits: subnormal numbers, infinities and ties among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, 40000, np.uint32)
    bits[:4000] = bits[:4000] & 0xFFFF0000 | 0x8000
    array = bits.view(np.float32)
    array = array[~np.isnan(array)]
    orbax.write_arrays(tmp_path, {"a": array})
    place = SingleDeviceSharding(jax.devices()[0])
    found = orbax.read_arrays(tmp_path, {"a": jax.ShapeDtypeStruct(array.shape, jnp.bfloat16, sharding=place)})
    expected = array.astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found["a"]).view(np.uint16), expected.view(np.uint16))


def test_no_piece_is_larger_or_much_smaller_than_it_should_be(tree, tmp_path, small_pieces):
    """Broken by leaving the sizes to Orbax, which would store 509 rows of 16 bytes."""
    orbax.write_arrays(tmp_path, tree)
    for name, leaf in tree["a"].items():
        stored = orbax._open(tmp_path / "params", f"a/{name}", orbax._context())
        chunk = stored.chunk_layout.read_chunk_template.shape
        size = math.prod(chunk) * leaf.dtype.itemsize
        assert min(64, leaf.nbytes) <= size <= leaf.nbytes
        assert all(whole % part == 0 for whole, part in zip(leaf.shape, chunk, strict=True))
        if leaf.shape != (509, 4):  # Could only be divided into rows of 16 bytes.
            assert size <= 4096
        assert orbax._piece_bytes(leaf.shape, leaf.dtype) == (None if size == leaf.nbytes else size)


def test_a_missing_piece_is_damage_not_zeros(tree, tmp_path, small_pieces):
    import tensorstore as ts

    orbax.write_arrays(tmp_path, tree)
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/params/"}}
    chunks = ts.KvStore.open(store).result()
    names = sorted(
        name for name in chunks.list().result() if name.startswith(b"a.n2/") and not name.endswith(b".zarray")
    )
    assert len(names) > 2
    chunks.delete_range(ts.KvStore.KeyRange(names[1], names[1] + b"\0")).result()
    place = SingleDeviceSharding(jax.devices()[0])
    expected = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)
    for read in (lambda: orbax.read_arrays(tmp_path, expected), lambda: orbax.hash_stored(tmp_path)):
        with pytest.raises(ValueError, match=r"params: tensor 'a/n2': damaged: .*missing"):
            read()


def start_a_save(directory) -> subprocess.Popen:
    """A process in the midst of a save."""
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


def test_what_a_killed_save_left_is_cleared_away(tmp_path, model, same):
    """And nothing else: no living process's, no other checkpoint's."""
    process = start_a_save(tmp_path / "model")
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


def test_what_a_killed_save_had_moved_away_is_put_back(tmp_path, model, same, monkeypatch):
    save_model(tmp_path / "model", model)
    (tmp_path / "model").rename(tmp_path / ".model.old-1")
    (tmp_path / ".model.partial-1").mkdir()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(save.config_file, "write_config", fail)
        with pytest.raises(OSError, match="disk full"):
            save_model(tmp_path / "model", random_model(model.config, 9))
    same(load_model(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / ".model.old-1").mkdir()
    save_model(tmp_path / "model", model)
    same(load_model(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
