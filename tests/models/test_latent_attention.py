"""Latent attention and attention in chunks: caches, pages, INT8, meshes, and files of DeepSeek and Llama 4."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bass_jax as bass
from bass_jax.checkpoint import load_model, save_hugging_face, save_model
from bass_jax.checkpoint.huggingface import dequantize_blocks
from bass_jax.cost_model.pass_shape import pass_shape
from bass_jax.drafters import NgramDrafter
from bass_jax.models import Model, param_shapes, place_model, tensor_parallel_mesh
from bass_jax.models.families import FAMILIES
from bass_jax.models.quantize_model import quantize_model
from tests import tiny
from tests.checkpoint.small import random_model
from tests.decoding.test_caches import PLANS, advance, assert_caches_are_correct, start
from tests.marks import mostly_slow
from tests.models.cases import CONFIGS, VOCAB
from tests.models.passes import read_texts, relative_error
from tests.models.test_quantize import dequantized

NAMES = (
    "deepseek_v2-groups-no-query-rank-yarn-biases-tied",
    "deepseek_v3",
    "llama4_text",
)
TEXTS = [np.random.default_rng(i).integers(0, VOCAB, size) for i, size in enumerate((21, 34))]


def model_of(name: str, **changes) -> Model:
    """Returns a random model of a configuration of `cases`."""
    content = CONFIGS[name] | changes
    return random_model(FAMILIES[content["model_type"]].read_config(content))


QUICK_NAMES = mostly_slow(NAMES, lambda name: name == "deepseek_v3")
"""Llama 4 is compared with `transformers` by a quick test too, and DeepSeek-V2 has the latent attention of V3."""


@pytest.fixture(scope="module", params=QUICK_NAMES)
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def latent():
    return model_of("deepseek_v3")


def test_a_cache_holds_compressed_vectors_and_rotated_keys_only(latent):
    cache = latent.init_cache(3, 64)
    assert {keys.shape for keys in cache.keys} == {(3, 1, 64, 20 + 6)}
    assert {values.size for values in cache.values} == {0}
    assert pass_shape(latent.config).cache_bytes == 2 * 26 * 4


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_of_an_attention_are_counted(name):
    config = model_of(name).config
    shapes = param_shapes(config)
    found = sum(
        leaf.size
        for path, leaf in shapes.items()
        if path.startswith("layer_0/attention/") and not path.endswith(("norm", "bias"))
    )
    assert config.layers[0].attention.num_weights(config.width) == found


@pytest.mark.slow
def test_whole_sequences_have_the_hidden_states_of_cached_passes(model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 40)))
    positions = jnp.tile(jnp.arange(40), (2, 1))
    expected = jax.jit(Model.hidden_states)(model, tokens, positions, model.init_cache(2, 64)).hidden

    def spread(model):
        hidden = model.hidden_states(tokens, positions, None).hidden
        return hidden.std(), hidden

    gradient, found = jax.jit(jax.grad(spread, has_aux=True))(model)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", [("deepseek_v3", {"num_hidden_layers": 1}), *((name, {}) for name in NAMES)])
def test_caches_equal_a_fresh_prefill(name, changes):
    target = model_of(name, vocab_size=tiny.VOCAB, **changes)
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))
    state, infos = advance(pair, start(pair), PLANS["mixed"])
    assert sum(int(info.num_accepted.sum()) for info in infos) > 0
    assert_caches_are_correct(pair, state)


@pytest.mark.slow
def test_candidates_have_the_logits_of_single_drafts(model):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (1, 20)).astype(np.int32)
    drafts = np.random.default_rng(2).integers(0, VOCAB, (1, 2, 3)).astype(np.int32)
    forward = jax.jit(Model.forward)
    prefix = forward(model, tokens, np.arange(20)[None], model.init_cache(1, 64)).cache
    places = jnp.tile(jnp.arange(20, 23), (1, 2, 1))
    output = jax.jit(Model.forward_candidates)(model, drafts, places, prefix)
    for i in range(2):
        single = forward(model, drafts[:, i], places[:, i], prefix)
        np.testing.assert_allclose(output.logits[:, i], single.logits, atol=1e-4)
        kept = bass.models.kv_cache.keep_candidate(output.cache, output.candidates, jnp.array([i]), places[:, i])
        jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, atol=1e-5), kept, single.cache)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cache_dtype"), [*((name, None) for name in NAMES), ("deepseek_v3", "int8")])
def test_an_engine_with_pages_gives_the_tokens_of_dense_caches(name, cache_dtype):
    model = model_of(name)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, cache_dtype=cache_dtype))
    pair = bass.Pair(model, NgramDrafter(3, 2))
    prompts = [[*range(1, 30)], [5, 6, 5, 6], [7]]
    expected = bass.generate(pair, prompts, bass.SpecConfig(3), max_new_tokens=16)
    config = bass.EngineConfig(num_slots=3, capacity=64, chunk=16, buckets=(1, 4), page_size=16)
    engine = bass.Engine(pair, bass.SpecConfig(3), config=config)
    handles = [engine.submit(prompt, max_new_tokens=16) for prompt in prompts]
    engine.run()
    for handle, tokens in zip(handles, expected.tokens, strict=True):
        assert handle.result().tokens.tolist() == tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int8_activations"])
def test_int8_logits_are_those_of_the_dequantized_weights(latent, quantize):
    quantized = quantize_model(latent, quantize)
    assert quantized.params["layer_0"]["attention"]["kv_up"].dtype == jnp.int8
    tolerance = 1e-5 if quantize == "int8" else 0.05
    for found, expected in zip(read_texts(quantized, TEXTS), read_texts(dequantized(quantized), TEXTS), strict=True):
        assert relative_error(found, expected) < tolerance


@pytest.mark.slow
def test_an_int8_cache_changes_logits_by_rounding_only():
    """Without experts, because rounding can change their choice."""
    model = model_of("deepseek_v3", first_k_dense_replace=2)
    rounded = dataclasses.replace(model, config=dataclasses.replace(model.config, cache_dtype="int8"))
    for found, expected in zip(read_texts(rounded, TEXTS), read_texts(model, TEXTS), strict=True):
        assert 0 < relative_error(found, expected) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_devices_give_the_logits_of_one(name):
    """Heads and experts are spread over the mesh; every device holds the whole cache of a latent attention."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    model = model_of(name, vocab_size=132)
    texts = [text % 132 for text in TEXTS]
    sharded = place_model(model, tensor_parallel_mesh(2))
    for found, expected in zip(read_texts(sharded, texts), read_texts(model, texts), strict=True):
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_our_format_is_bit_equal(name, tmp_path):
    model = model_of(name)
    save_model(tmp_path / "model", model)
    found = load_model(tmp_path / "model")
    assert found.config == model.config
    jax.tree.map(np.testing.assert_array_equal, found.params, model.params)


def edit_tensors(path, edit):
    """Replaces the tensors of a checkpoint by what `edit` returns of them."""
    tensors = edit(load_file(path / "model.safetensors"))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path / "model.safetensors")


def edit_config(path, **changes):
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | changes))


def test_layers_that_predict_further_tokens_are_not_read(latent, tmp_path):
    save_hugging_face(tmp_path / "model", latent)
    extra = {f"model.layers.2.{name}": np.zeros((4, 4), np.float32) for name in ("eh_proj.weight", "enorm.weight")}
    edit_tensors(tmp_path / "model", lambda tensors: tensors | extra)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "model").params, latent.params)
    edit_config(tmp_path / "model", num_hidden_layers=1, first_k_dense_replace=1)
    assert load_model(tmp_path / "model").config.num_layers == 1


@pytest.fixture
def fp8(latent, tmp_path):
    """Returns a checkpoint in FP8 with blocks of 16 x 8, the values of its matrices, and its tensors."""
    path, values, packed = tmp_path / "fp8", {}, {}
    save_hugging_face(path, latent)

    def pack(tensors):
        draw = np.random.default_rng(0)
        for name, tensor in tensors.items():
            packed[name] = tensor.astype(ml_dtypes.bfloat16) if "e_score" not in name else tensor
            if "proj" in name and name.endswith("weight"):
                packed[name] = tensor.astype(ml_dtypes.float8_e4m3fn)
                shape = [-(-size // one) for size, one in zip(tensor.shape, (16, 8), strict=True)]
                scales = packed[f"{name}_scale_inv"] = draw.uniform(0.5, 2.0, shape).astype(np.float32)
                wide = packed[name].astype(np.float32)
                values[name] = np.array(
                    [[wide[i, j] * scales[i // 16, j // 8] for j in range(wide.shape[1])] for i in range(len(wide))]
                )
        return packed

    edit_tensors(path, pack)
    edit_config(path, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 8]})
    return path, values, packed


def test_weights_in_fp8_are_dequantized(fp8, tmp_path):
    path, values, _ = fp8
    found = load_model(path)
    assert found.config.dtype == "bfloat16"
    assert found.params["layer_1"]["mlp"]["choice_bias"].dtype == jnp.float32
    save_hugging_face(tmp_path / "again", load_model(path, dtype="float32"))
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, value in values.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_fp8_without_scales_or_with_other_blocks_is_refused(fp8):
    path, values, tensors = fp8
    edit_config(path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="weight_block_size=None: expected two positive integers"):
        load_model(path)
    edit_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(ValueError, match=r"_scale_inv' has the shape .*; expected"):
        load_model(path)
    edit_config(path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="quant_method='awq': expected 'fp8'"):
        load_model(path)
    edit_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 8]})
    del tensors[f"{next(iter(values))}_scale_inv"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="has the dtype F8_E4M3"):
        load_model(path)


def test_the_last_blocks_may_be_smaller():
    values = np.ones((3, 5), ml_dtypes.float8_e4m3fn)
    scales = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
    expected = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    np.testing.assert_array_equal(dequantize_blocks(values, scales, (2, 2)), expected)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc': expected 'greedy' or 'group_limited"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': expected 'softmax'"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2: expected 1"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2: expected 4, as many as query heads"),
        ("deepseek_v3", {"head_dim": 12}, "head_dim=12: expected 6, the qk_rope_head_dim"),
        ("deepseek_v3", {"num_local_experts": 7}, "num_local_experts=7 and n_routed_experts=6: expected only n_routed"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "layer_types=.*: expected a list of 3"),
        ("llama4_text", {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 3}, "attention_chunk"),
        ("llama4_text", {"moe_layers": 3}, "moe_layers=3: expected a list of integers"),
        ("llama4_vision", {"text_config": None}, "text_config=None: expected a dictionary"),
    ],
)
def test_unsupported_values_are_refused(name, changes, message):
    content = CONFIGS[name] | changes
    with pytest.raises(ValueError, match=message):
        FAMILIES[content["model_type"]].read_config(content)


def test_a_llama_4_with_vision_gives_its_text_model(tmp_path):
    model = model_of("llama4_text")
    save_hugging_face(tmp_path / "model", model)
    vision = {"vision_model.x.weight": np.zeros(3, np.float32), "multi_modal_projector.w": np.zeros(3, np.float32)}
    edit_tensors(tmp_path / "model", lambda tensors: vision | {f"language_model.{k}": v for k, v in tensors.items()})
    text = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    found = load_model(tmp_path / "model")
    assert found.config == model.config
    jax.tree.map(np.testing.assert_array_equal, found.params, model.params)


def test_the_frequencies_of_llama_4_scout_are_divided_or_kept():
    """Its two factors on the original context are equal, so that no frequency is interpolated."""
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 500.0}
    config = FAMILIES["llama4_text"].read_config(CONFIGS["llama4_text"] | {"rope_parameters": scaling})
    rope = config.layers[0].attention.rope
    found = bass.models.rotary.frequencies(rope, 12, 256)
    plain = bass.models.rotary.frequencies(dataclasses.replace(rope, scaling=None), 12, 256)
    np.testing.assert_allclose(found, np.where(2 * np.pi / plain > 64, plain / 16, plain), rtol=1e-6)
