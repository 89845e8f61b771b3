"""A randomly damaged checkpoint raises an error of one line or loads. Ours never load with wrong numbers."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.checkpoint import load_model, load_tokenizer


def corrupt(content: bytes, draw: np.random.Generator) -> bytes:
    """Flips, overwrites, deletes or repeats a few bytes; half of the time among the first 400."""
    data = bytearray(content)
    for _ in range(draw.integers(1, 4)):
        at = int(draw.integers(0, min(len(data), 400) if draw.random() < 0.5 else len(data)))
        kind = draw.integers(0, 4)
        if kind == 0:
            data[at] ^= 1 << int(draw.integers(0, 8))
        elif kind == 1:
            data[at : at + 8] = draw.bytes(min(8, len(data) - at))
        elif kind == 2:
            del data[at : at + int(draw.integers(1, 30))]
        else:
            data[at:at] = data[at : at + int(draw.integers(1, 30))]
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "file", "rounds"),
    [
        ("theirs", "model.safetensors", 320),
        ("theirs", "config.json", 260),
        ("theirs", "tokenizer.json", 80),
        ("sharded", "model.safetensors.index.json", 160),
        ("pickled", "pytorch_model.bin.index.json", 100),
        ("model.gguf", "", 220),
        ("ours", "manifest.json", 160),
        ("ours", "model.safetensors", 60),
    ],
)
def test_random_corruption_is_refused_or_harmless(
    checkpoint, originals, model, name, file, rounds, same, npz_for_torch
):
    path = checkpoint / name
    damaged = path / file if file else path
    content = damaged.read_bytes()
    draw = np.random.default_rng(zlib.crc32(f"{name}/{file}".encode()))
    messages = []
    for _ in range(rounds):
        damaged.write_bytes(corrupt(content, draw))
        try:
            found = load_model(path)
            if file == "tokenizer.json" or name == "model.gguf":
                load_tokenizer(path).encode("the text")
        except ValueError as error:
            messages.append(str(error))
            continue
        if name == "ours":
            same(found, model)
        else:
            # These formats have no checksum of the tensors' data. Only structure and dtypes can be checked.
            assert jax.tree.structure(found.params) == jax.tree.structure(model.params)
            for array in jax.tree.leaves(found.params):
                assert array.dtype in (jnp.float32, jnp.bfloat16)
    damaged.write_bytes(content)
    same(load_model(path), model)
    assert len(messages) > rounds / 10
    assert not [message for message in messages if "\n" in message or str(checkpoint) not in message]


def test_random_corruption_of_our_arrays_is_always_refused(checkpoint, model, same):
    draw = np.random.default_rng(7)
    files = sorted(path for path in (checkpoint / "ours").rglob("*") if path.is_file() and path.name != "manifest.json")
    for _ in range(300):
        path = files[draw.integers(len(files))]
        content = path.read_bytes()
        damaged = corrupt(content, draw) if content else b"x"
        path.write_bytes(damaged)
        if damaged != content:
            with pytest.raises(ValueError, match="damaged"):
                load_model(checkpoint / "ours")
        path.write_bytes(content)
    same(load_model(checkpoint / "ours"), model)
