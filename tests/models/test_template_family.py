"""A family written by the guide in `bass_jax/models/families/template.py` loads through the public functions."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bass_jax.checkpoint import convert, load_model, save_hugging_face
from bass_jax.models.families import FAMILIES, Family, register_family, template
from tests.checkpoint.gguf_writer import hugging_face_tensors
from tests.checkpoint.small import random_model, small_config
from tests.models.passes import read_texts

NAMES = {
    "model.embed_tokens": "tok",
    "model.norm": "out_norm",
    "lm_head": "head",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.out",
    "model.layers": "blocks",
}
"""Tensor names of Llama and of the template family."""
SHAPE = {"vocab": 264, "dim": 16, "depth": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "max_len": 128, "tied": False}


@pytest.fixture
def registered():
    register_family(template.FAMILY)
    yield
    del FAMILIES[template.FAMILY.name]


@pytest.fixture
def llama():
    return random_model(small_config(num_kv_heads=2, is_tied=False))


@pytest.fixture
def directory(llama, tmp_path):
    """Writes a checkpoint of the template family with the weights of a Llama."""
    tensors = hugging_face_tensors(llama)
    for i in range(llama.config.num_layers):
        parts = [tensors.pop(f"model.layers.{i}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"model.layers.{i}.attn.qkv.weight"] = np.concatenate(parts)
    renamed = {}
    for name, tensor in tensors.items():
        for llama_name, template_name in NAMES.items():
            name = name.replace(llama_name, template_name)
        renamed[name] = tensor
    (tmp_path / "model").mkdir()
    save_file(renamed, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "template"} | SHAPE))
    return tmp_path / "model"


def test_an_unregistered_family_is_refused(directory):
    with pytest.raises(ValueError, match="model_type='template': expected one of"):
        load_model(directory)


def test_a_registered_family_loads_converts_and_is_exported(registered, directory, llama, tmp_path):
    model = load_model(directory)
    texts = [np.arange(20) % 7, np.arange(30) % 11]
    for found, expected in zip(read_texts(model, texts), read_texts(llama, texts), strict=True):
        np.testing.assert_array_equal(found, expected)
    save_hugging_face(tmp_path / "again", model)
    original, again = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "again"))
    assert original.keys() == again.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(again[name], tensor)
    assert load_model(tmp_path / "again").config == model.config
    convert(directory, tmp_path / "ours")
    ours = load_model(tmp_path / "ours")
    assert ours.config == model.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, model.params)


def test_an_unsupported_value_is_refused(registered, directory):
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"alibi": True}))
    with pytest.raises(ValueError, match=r"config\.json: alibi=True: expected False"):
        load_model(directory)


def test_a_name_can_be_registered_only_once():
    with pytest.raises(ValueError, match="name='llama': there is a family of that name already"):
        register_family(Family("llama", template.read_config, template.write_config, template.rules))
    register_family(FAMILIES["llama"])  # Registering the same family again is allowed.
