"""Saved models are loaded bit-equal, and a failed save leaves no files."""

import dataclasses
import fnmatch
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

from bass_jax.checkpoint import convert, load_model, load_tokenizer, save, save_hugging_face, save_model
from bass_jax.models import DenseMLP, Model, MoEConfig
from bass_jax.models.model_config import RopeScaling
from tests.checkpoint.gguf_writer import write_gguf
from tests.checkpoint.npz_file import write_npz
from tests.checkpoint.slow_bpe import byte_names
from tests.checkpoint.small import VOCAB, random_model, small_config

CHANGES = {
    "tied": {},
    "untied": {"is_tied": False},
    "biases": {"has_attention_bias": True, "has_mlp_bias": True},
    "rope": {"rope_scaling": RopeScaling("llama3", 4.0, 1.0, 4.0, 32)},
    "bfloat16": {"dtype": "bfloat16"},
    "experts": {"moe": MoEConfig(4, 2, 24, score="sigmoid", shared=DenseMLP(8))},
    "trimmed": {"is_tied": False, "embedding_width": 24, "output_vocab_size": 40},
}


def cast(model: Model, dtype: str) -> Model:
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    return Model(params, dataclasses.replace(model.config, dtype=dtype), model.output_ids)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_our_format_is_bit_equal(changes, tmp_path, same):
    model = random_model(small_config(**changes), 1)
    save_model(tmp_path / "model", model)
    same(load_model(tmp_path / "model"), model)
    same(load_model(str(tmp_path / "model"), dtype="bfloat16"), cast(model, "bfloat16"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["tied", "untied", "biases", "rope", "bfloat16"])
def test_hugging_face_format_is_bit_equal(name, tmp_path, same):
    model = random_model(small_config(**CHANGES[name]), 1)
    save_hugging_face(tmp_path / "model", model)
    same(load_model(tmp_path / "model"), model)
    same(load_model(tmp_path / "model", dtype="bfloat16"), cast(model, "bfloat16"))


def test_convert_keeps_parameters_and_tokenizer(tmp_path, tokenizer, model, same):
    save_hugging_face(tmp_path / "source", model, tokenizer=tokenizer)
    calls = []
    convert(tmp_path / "source", tmp_path / "ours", license="MIT", progress=lambda *call: calls.append(call))
    same(load_model(tmp_path / "ours"), model)
    assert load_tokenizer(tmp_path / "ours") == tokenizer
    num_tensors = len(jax.tree.leaves(model.params))
    assert calls == [(i + 1, num_tensors) for i in range(num_tensors)]
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert manifest["source"] == str(tmp_path / "source") and manifest["license"] == "MIT"
    assert manifest["tokenizer_fingerprint"] == tokenizer.fingerprint
    convert(tmp_path / "ours", tmp_path / "again", dtype="bfloat16")
    same(load_model(tmp_path / "again"), cast(model, "bfloat16"))


def test_convert_stores_the_tokenizer_of_a_gguf_file(tmp_path, model, same):
    tokens = ["<a>", "<b>", "<end>", *byte_names(), "th"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    write_gguf(tmp_path / "model.gguf", model, tokens=tokens)
    convert(tmp_path / "model.gguf", tmp_path / "ours")
    same(load_model(tmp_path / "ours"), model)
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert tokenizer == load_tokenizer(tmp_path / "model.gguf")
    assert tokenizer.encode("the<end>").tolist() == [tokens.index("th"), tokens.index("e"), 2]
    assert tokenizer.stop_ids == (2,)
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert manifest["source_sha256"] is not None


def test_a_draft_saved_without_its_embedding_loads_with_that_of_the_target(tmp_path, model, tokenizer):
    config = small_config(is_tied=False, embedding_width=16, output_vocab_size=40, width=8)
    draft = random_model(config, 2)
    draft = Model(draft.params | {"embedding": model.params["embedding"]}, config, draft.output_ids)
    save_model(tmp_path / "draft", draft, tokenizer=tokenizer, shares_embedding=True)
    assert not (tmp_path / "draft" / "tokenizer.json").exists()
    found = load_model(tmp_path / "draft", embedding=model.params["embedding"])
    assert found.params["embedding"] is model.params["embedding"]
    np.testing.assert_array_equal(found.output_ids, draft.output_ids)
    with pytest.raises(ValueError, match="load it as a pair"):
        load_model(tmp_path / "draft")
    with pytest.raises(ValueError, match=r"expected float32 \[264, 16\], the target's is float32 \[3, 16\]"):
        load_model(tmp_path / "draft", embedding=model.params["embedding"][:3])


def test_every_array_is_placed_on_the_mesh(tmp_path, model):
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    save_model(tmp_path / "ours", model)
    save_hugging_face(tmp_path / "theirs", model)
    save_model(tmp_path / "packed", model, is_packed=True)
    for path in ("ours", "theirs", "packed"):
        found = load_model(tmp_path / path, mesh=mesh)
        expected = load_model(tmp_path / path) if path == "packed" else model
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.sharding.mesh == mesh
            np.testing.assert_array_equal(a, b)
        assert found.params["embedding"].addressable_shards[0].data.shape == (VOCAB // 2, 16)
        assert found.params["layer_1"]["attention"]["qkv"].addressable_shards[0].data.shape == (2, 3, 4, 16)


def test_saving_again_replaces_the_checkpoint(tmp_path, model, same):
    save_model(tmp_path / "model", random_model(model.config, 9))
    save_model(tmp_path / "model", model)
    same(load_model(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_path_can_start_with_the_parent_directory(tmp_path, model, same, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save_model(Path("../model"), model)
    same(load_model("../model"), model)


def test_only_checkpoints_are_overwritten(tmp_path, model):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a checkpoint"):
        save_model(tmp_path, model)
    with pytest.raises(ValueError, match="exists and is not a checkpoint"):
        save_hugging_face(tmp_path / "notes.txt", model)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path, model, same, monkeypatch):
    save_model(tmp_path / "model", model)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(save, "write_config_json", fail)
    for name in ("model", "new"):
        with pytest.raises(OSError, match="disk full"):
            save_model(tmp_path / name, random_model(model.config, 9))
    same(load_model(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_rename_restores_the_previous_checkpoint(tmp_path, model, same, monkeypatch):
    save_model(tmp_path / "model", model)
    rename = Path.rename

    def fail(path, destination):
        if "partial" in path.name and Path(destination).name == "model":
            raise OSError("cannot move")
        return rename(path, destination)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="cannot move"):
        save_model(tmp_path / "model", random_model(model.config, 9))
    same(load_model(tmp_path / "model"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_hub_id_is_downloaded_without_pickled_weights(tmp_path, model, same, monkeypatch):
    import huggingface_hub

    save_hugging_face(tmp_path / "model", model)
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    same(load_model("someone/some-model"), model)
    [(name, patterns)] = asked
    assert name == "someone/some-model" and "*.safetensors" in patterns and "*.bin" not in patterns


def test_pickled_weights_are_downloaded_if_there_are_no_safetensors(tmp_path, model, same, monkeypatch, npz_for_torch):
    import huggingface_hub

    save_hugging_face(tmp_path / "model", model)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        if any(fnmatch.fnmatch("pytorch_model.bin", pattern) for pattern in allow_patterns):
            write_npz(tmp_path / "model" / "pytorch_model.bin", tensors)
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    same(load_model("someone/some-model"), model)
    assert len(asked) == 2


def test_a_hub_id_is_found_in_the_hubs_cache_without_a_network(tmp_path, model, same, monkeypatch):
    """The test writes the layout of the library's cache, in which files are links to blobs."""
    import huggingface_hub.constants

    save_hugging_face(tmp_path / "model", model)
    repository = tmp_path / "hub" / "models--someone--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    for directory in (snapshot, repository / "blobs", repository / "refs"):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for i, file in enumerate(sorted((tmp_path / "model").iterdir())):
        file.rename(repository / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    same(load_model("someone/some-model"), model)
