"""A bad checkpoint raises a ValueError of one line that names the file, the key or the tensor."""

import json
import shutil

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bass_jax.checkpoint import convert, load_model, load_tokenizer, save_hugging_face, save_model
from bass_jax.models import Model
from tests.checkpoint.gguf_writer import hugging_face_tensors, write_gguf
from tests.checkpoint.small import random_model, small_config


def assert_refused(path, message):
    """Asserts that loading and converting raise an error of one line, and that converting leaves no files."""
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    destination = path.parent / "converted"
    with pytest.raises(ValueError, match=message):
        convert(path, destination)
    assert not [entry for entry in path.parent.iterdir() if "converted" in entry.name]


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_the_undamaged_checkpoints_load(originals, model, same, npz_for_torch):
    for name in ("theirs", "ours", "sharded", "pickled", "model.gguf"):
        same(load_model(originals / name), model)


def test_a_missing_or_unknown_file_is_refused(tmp_path):
    assert_refused(tmp_path / "absent", "absent: no such file or directory$")
    assert_refused(tmp_path / "absent.gguf", "absent.gguf: no such file or directory$")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", r"empty/config.json: no such file")
    with pytest.raises(ValueError, match="empty: no tokenizer"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("hello")
    assert_refused(tmp_path / "notes.txt", r"notes.txt: expected a directory or a .gguf file")


def test_a_hub_id_without_a_network_is_an_error_of_one_line(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ValueError, match=r"^a/b: no such file or directory, and cannot be downloaded as a Hub id: no network$"
    ):
        load_model("a/b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"theirs: model_type='mamba': expected one of '"),
        ({"model_type": ...}, r"model_type=None: expected one of"),
        ({"model_type": "gemma4_text"}, r"theirs: model_type='gemma4_text': expected one of '"),
        ({"hidden_act": "tanh"}, r"theirs: config.json: hidden_act='tanh': expected one of \['gelu'"),
        ({"hidden_size": "big"}, r"hidden_size='big': expected an integer"),
        ({"num_hidden_layers": ...}, r"missing key 'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, r"num_kv_heads=3: expected a divisor of num_heads=4"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type='dynamic': expected 'default'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"missing key 'factor'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
            r"original_max_position_embeddings=0: expected a positive integer",
        ),
        ({"rope_parameters": {"rope_theta": 1}}, r"rope_base=1.0: expected a number above 1"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"missing key 'factor'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_type='dynamic'"),
        ({"num_hidden_layers": 3}, r"theirs: missing tensor 'model.layers.2.input_layernorm.weight' \(9 missing\)"),
        ({"num_hidden_layers": 1}, r"theirs: unexpected tensor 'model.layers.1.*' \(9 unexpected\)"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000: expected a whole number from 1 to 1000"),
        ({"head_dim": 1 << 40}, r"asks for at least \d+ parameters"),
        ({"vocab_size": 265}, r"misshapen tensor 'model.embed_tokens.weight' \[264, 16\]: does not make 'embedding'"),
        (
            {"intermediate_size": 31},
            r"misshapen tensor 'model.layers.0.mlp.down_proj.weight' \[16, 32\]: does not make",
        ),
        ({"head_dim": 2}, r"misshapen tensor 'model.layers.0.self_attn.o_proj.weight' \[16, 16\]: does not"),
        ({"tie_word_embeddings": False}, r"missing tensor 'lm_head.weight' \(1 missing\)"),
        ({"model_type": "mistral", "sliding_window": -1}, r"theirs: window=-1: expected a whole number of at least 1"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50.0: expected None"),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": -1.0},
            r"attention_softcap=-1.0: expected a positive",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, r"use_bidirectional_attention=True: expected"),
        (
            {"model_type": "gemma3_text", "layer_types": ["chunked", "full_attention"]},
            r"layer_types: 'chunked': expected",
        ),
        ({"model_type": "qwen3"}, r"missing tensor 'model.layers.0.self_attn.k_norm.weight' \(4 missing\)"),
        ({"model_type": "codegen"}, r"hidden_size=16 and n_embd=None: expected only n_embd"),
        ({"attention_bias": True}, r"missing tensor 'model.layers.0.self_attn.k_proj.bias'"),
    ],
)
def test_an_unsupported_configuration_is_refused(checkpoint, changes, message):
    edit_json(checkpoint / "theirs" / "config.json", **changes)
    assert_refused(checkpoint / "theirs", message)


def test_a_stored_head_that_differs_from_a_tied_embedding_is_refused(checkpoint):
    path = checkpoint / "theirs" / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.copy()}, path)
    load_model(checkpoint / "theirs")  # An equal copy is accepted.
    changed = embedding.copy()
    changed[3, 5] += 1e-3
    save_file(tensors | {"lm_head.weight": changed}, path)
    assert_refused(
        checkpoint / "theirs",
        "tensors 'lm_head.weight' and 'model.embed_tokens.weight' differ: expected equal ones, .* ties them",
    )


def test_missing_unexpected_and_misshapen_tensors_are_refused(checkpoint):
    path = checkpoint / "theirs" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"

    def write(**changes):
        save_file({key: value for key, value in (tensors | changes).items() if value is not None}, path)

    write(**{name: None})
    assert_refused(checkpoint / "theirs", f"theirs: missing tensor '{name}' \\(1 missing\\)")
    write(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)})
    load_model(checkpoint / "theirs")  # Old checkpoints store this; it follows from the configuration.
    write(extra=np.zeros(3, np.float32))
    assert_refused(checkpoint / "theirs", r"theirs: unexpected tensor 'extra' \(1 unexpected\)")
    write(**{name: np.ascontiguousarray(tensors[name].T)})
    assert_refused(
        checkpoint / "theirs", rf"misshapen tensor '{name}' \[32, 16\]: does not make 'layer_1/mlp/down' \[16, 32\]"
    )
    write(**{name: tensors[name].astype(np.int32)})
    assert_refused(checkpoint / "theirs", rf"model.safetensors: tensor '{name}' has the dtype I32; expected one of")


def test_a_truncated_file_is_refused(checkpoint):
    for name, message in (
        ("theirs/model.safetensors", r"model.safetensors: not readable as safetensors"),
        ("sharded/part-1.safetensors", r"part-1.safetensors: not readable as safetensors"),
        ("model.gguf", r"model.gguf: not readable as GGUF"),
    ):
        path = checkpoint / name
        content = path.read_bytes()
        for size in (0, 7, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:size])
            assert_refused(path if path.suffix == ".gguf" else path.parent, message)
        path.write_bytes(content)


def test_a_damaged_length_in_a_gguf_file_is_refused(tmp_path, model):
    """An array of numbers in a file of 39 KB with the length 2**20; the library would read its end again and again."""
    path = tmp_path / "model.gguf"
    write_gguf(path, model, extra={"numbers": [1, 2, 3]})
    field = gguf.GGUFReader(path).get_field("llama.numbers")
    start = field.offset + sum(part.nbytes for part in field.parts[:4])  # length and name, types of field and items
    content = bytearray(path.read_bytes())
    assert content[start : start + 8] == (3).to_bytes(8, "little")
    content[start : start + 8] = (2**20).to_bytes(8, "little")
    content += bytes((start - len(content)) % 4)  # The library notices numbers that the end cuts.
    path.write_bytes(content)
    assert_refused(path, r"model.gguf: not readable as GGUF: a value is beyond the end of the file")


def test_an_index_that_does_not_match_its_files_is_refused(checkpoint):
    index = checkpoint / "sharded" / "model.safetensors.index.json"
    (checkpoint / "sharded" / "part-1.safetensors").unlink()
    assert_refused(checkpoint / "sharded", r"index.json: names part-1.safetensors, which is missing")
    edit_json(index, weight_map={"a": 3})
    assert_refused(checkpoint / "sharded", r"index.json: weight_map: expected a file name per tensor")
    shutil.copy(checkpoint / "sharded" / "part-0.safetensors", checkpoint / "sharded" / "part-1.safetensors")
    edit_json(index, weight_map={"a": "part-0.safetensors", "b": "part-1.safetensors"})
    assert_refused(checkpoint / "sharded", r"part-1.safetensors: tensor '.*' is in another shard too")
    edit_json(index, weight_map={"a": "../theirs/model.safetensors"})
    assert_refused(checkpoint / "sharded", r"index.json: weight_map: expected a file name per tensor")


def test_an_unknown_gguf_architecture_or_tokenizer_is_refused(tmp_path, model):
    path = tmp_path / "model.gguf"
    write_gguf(path, model, architecture="bloom")
    assert_refused(path, r"model.gguf: general.architecture='bloom': expected one of \['llama'")
    tokens = [*map(str, range(model.config.vocab_size))]
    write_gguf(path, model, tokens=tokens)
    refused_tokenizer = r"model.gguf: not a readable tokenizer: .*`t`"
    with pytest.raises(ValueError, match=refused_tokenizer):
        load_tokenizer(path)
    with pytest.raises(ValueError, match=refused_tokenizer):
        convert(path, tmp_path / "converted")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]
    write_gguf(path, model)
    with pytest.raises(ValueError, match=r"model.gguf: tokenizer.ggml.model=None"):
        load_tokenizer(path)


def test_damage_to_any_file_of_our_checkpoints_is_detected(checkpoint):
    ours = checkpoint / "ours"
    for path in sorted(path for path in ours.rglob("*") if path.is_file() and path.name != "manifest.json"):
        content = path.read_bytes()
        for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:]) if content else (b"x",):
            path.write_bytes(damaged)
            assert_refused(ours, f"{path.name}: damaged: its sha256 is")
        path.unlink()
        assert_refused(ours, f"{path.name}: No such file")
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, r"manifest.json: version=1: this release reads version 3"),
        ({"format": "other"}, r"manifest.json: not a manifest of a bass_jax checkpoint"),
        ({"shares_embeding": True}, r"manifest.json: unknown key 'shares_embeding'"),
        ({"shares_embedding": 1}, r"shares_embedding=1: expected true or false"),
        ({"is_packed": "yes"}, r"is_packed='yes': expected true or false"),
        ({"license": 3}, r"license=3: expected a string"),
        ({"files": []}, r"files: expected a hash per file"),
        ({"files": {}}, r"model.safetensors: not in manifest.json"),
    ],
)
def test_an_invalid_manifest_is_refused(checkpoint, changes, message):
    edit_json(checkpoint / "ours" / "manifest.json", **changes)
    assert_refused(checkpoint / "ours", message)


@pytest.mark.parametrize(
    ("edit", "changes", "message"),
    [
        (lambda p: p | {"extra": jnp.zeros(3)}, {}, r"model.safetensors: unexpected tensor 'extra' \(1 unexpected\)"),
        (
            lambda p: {k: v for k, v in p.items() if k != "final_norm"},
            {},
            r"model.safetensors: missing tensor 'final_norm'",
        ),
        (lambda p: p, {"vocab_size": 300}, r"'embedding' has the shape \(264, 16\); expected \(300, 16\)"),
        (lambda p: p | {"final_norm": jnp.zeros(16, int)}, {}, r"'final_norm' has the dtype I32; expected float32"),
    ],
)
def test_arrays_that_do_not_match_our_configuration_are_refused(tmp_path, model, edit, changes, message):
    save_model(tmp_path / "model", Model(edit(model.params), small_config(**changes)))
    assert_refused(tmp_path / "model", message)


def test_load_model_refuses_the_directory_of_a_pair(tmp_path):
    (tmp_path / "manifest.json").write_text('{"target": {"path": "target"}}')
    with pytest.raises(ValueError, match="a pair of models, not one; load it with load_pair"):
        load_model(tmp_path)


def test_a_damaged_tokenizer_is_refused(checkpoint):
    path = checkpoint / "theirs" / "tokenizer.json"
    content = path.read_text()
    for damaged in (content[: len(content) // 2], "{}", content.replace('"BPE"', '"Magic"')):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"tokenizer.json: not a readable tokenizer: ") as caught:
            load_tokenizer(checkpoint / "theirs")
        assert "\n" not in str(caught.value)


def test_the_tensors_of_the_gguf_writer_are_those_of_the_exporter(originals, model):
    tensors = load_file(originals / "theirs" / "model.safetensors")
    expected = hugging_face_tensors(model)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], tensor)


def test_a_model_that_hugging_face_cannot_express_is_not_exported(tmp_path):
    config = small_config(is_tied=False, embedding_width=24, output_vocab_size=40)
    with pytest.raises(ValueError, match="no projected embeddings and no trimmed heads"):
        save_hugging_face(tmp_path / "model", random_model(config))
    assert not list(tmp_path.iterdir())
