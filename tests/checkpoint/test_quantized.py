"""Loading, converting and `quantize_model` give the same quantized parameters, which can be saved."""

import dataclasses

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.checkpoint import (
    convert,
    inspect_checkpoint,
    load_model,
    load_target_and_draft,
    save_hugging_face,
    save_model,
)
from bass_jax.models.weights import dequantize_weight
from tests.checkpoint.small import random_model, small_config


def assert_same(found: bass.models.Model, expected: bass.models.Model):
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize("changes", [{}, {"is_tied": False, "dtype": "bfloat16", "has_mlp_bias": True}])
def test_loading_and_converting_quantize_as_in_memory(kind, changes, tmp_path):
    model = random_model(small_config(**changes))
    (save_model if kind == "ours" else save_hugging_face)(tmp_path / "model", model)
    expected = bass.models.quantize_model(model)
    assert_same(load_model(tmp_path / "model", quantize="int8"), expected)

    convert(tmp_path / "model", tmp_path / "int8", quantize="int8")
    assert_same(load_model(tmp_path / "int8"), expected)
    rounded = load_model(tmp_path / "int8", quantize="int8_activations", cache_dtype="int8")
    assert (rounded.config.quantize, rounded.config.cache_dtype) == ("int8_activations", "int8")

    found = inspect_checkpoint(tmp_path / "int8")
    assert found.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(expected.params))


def test_a_quantized_model_is_saved_and_loaded(tmp_path):
    model = bass.models.quantize_model(random_model(small_config()), cache_dtype="int8")
    save_model(tmp_path / "model", model)
    assert_same(load_model(tmp_path / "model", cache_dtype="int8"), model)
    with pytest.raises(ValueError, match="quantize='int8': expected a model without INT8 weights"):
        save_hugging_face(tmp_path / "theirs", model)


@pytest.mark.slow
def test_a_draft_shares_the_embedding_of_a_quantized_target(tmp_path, tokenizer):
    target = random_model(small_config())
    draft = random_model(small_config(is_tied=False, width=8, num_layers=1, embedding_width=16), seed=1)
    draft = dataclasses.replace(draft, params=draft.params | {"embedding": target.params["embedding"]})
    save_model(tmp_path / "target", target, tokenizer=tokenizer)
    save_model(tmp_path / "draft", draft, tokenizer=tokenizer, shares_embedding=True)
    (tmp_path / "manifest.json").write_text('{"target": {"path": "target"}, "draft": {"path": "draft"}}')

    found, small, _ = load_target_and_draft(tmp_path, quantize="int8", quantize_draft="int8")
    assert small.params["embedding"] is found.params["embedding"]
    assert small.params["embedding_scale"] is found.params["embedding_scale"]
    pair = bass.load_pair(tmp_path, quantize="int8")
    assert pair.drafter.model.config.quantize is None
    texts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    runs = [
        bass.generate(pair, texts, max_new_tokens=12, step=step, stop_tokens=()) for step in ("speculate", "decode")
    ]
    for speculated, decoded in zip(*(run.tokens for run in runs), strict=True):
        np.testing.assert_array_equal(speculated, decoded)


@pytest.mark.parametrize("changes", [{}, {"is_tied": False, "dtype": "bfloat16", "output_vocab_size": 5}])
def test_a_packed_model_is_dequantized_on_load(changes, tmp_path):
    model = random_model(small_config(**changes))
    save_model(tmp_path / "packed", model, is_packed=True)
    rounded = bass.models.quantize_model(model)
    found = load_model(tmp_path / "packed")
    assert found.config == model.config
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found.params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), model.params
    )
    weight, layer = found.params["layer_0"]["mlp"]["down"], rounded.params["layer_0"]["mlp"]
    np.testing.assert_array_equal(weight, dequantize_weight(layer["down"], layer["down_scale"]).astype(weight.dtype))
    np.testing.assert_array_equal(found.params["final_norm"], model.params["final_norm"])
    # With quantize="int8" it equals a model that was not packed.
    asked = load_model(tmp_path / "packed", quantize="int8")
    assert_same(dataclasses.replace(asked, output_ids=None), dataclasses.replace(rounded, output_ids=None))
    # Converting it stores the dequantized parameters.
    convert(tmp_path / "packed", tmp_path / "whole")
    assert_same(load_model(tmp_path / "whole"), found)
    with pytest.raises(ValueError, match="expected one without INT8 weights"):
        save_model(tmp_path / "twice", rounded, is_packed=True)


def test_a_packed_draft_shares_the_embedding_of_its_target(tmp_path, tokenizer):
    target = random_model(small_config())
    draft = random_model(small_config(is_tied=False, num_layers=1), seed=1)
    draft = dataclasses.replace(draft, params=draft.params | {"embedding": target.params["embedding"]})
    save_model(tmp_path / "target", target, tokenizer=tokenizer)
    save_model(tmp_path / "draft", draft, tokenizer=tokenizer, shares_embedding=True, is_packed=True)
    (tmp_path / "manifest.json").write_text('{"target": {"path": "target"}, "draft": {"path": "draft"}}')
    for asked, expected in ((None, None), ("int8", "int8")):
        found, small, _ = load_target_and_draft(tmp_path, quantize_draft=asked)
        assert small.config.quantize == expected
        assert small.params["embedding"] is found.params["embedding"]
    inspection = inspect_checkpoint(tmp_path / "draft")
    assert inspection.config.quantize is None and "head_scale" not in inspection.shapes
