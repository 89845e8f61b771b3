"""INT8: logits are those of the dequantized weights, and greedy speculation equals greedy decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import bass_jax as bass
from bass_jax.models import DenseMLP, MoEConfig
from bass_jax.models.kv_cache import Int8KV
from bass_jax.models.weights import NUM_CONTRACTED, Weight, dequantize_weight, multiply, quantize_weight
from tests import tiny
from tests.marks import mostly_slow
from tests.models.passes import relative_error

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12)).astype(np.int32)
SHAPES = [
    {},
    {"is_tied": True, "num_kv_heads": 2},
    {"is_gated": False, "activation": "relu", "norm": "layer", "has_attention_bias": True, "has_mlp_bias": True},
    {"is_tied": True, "num_kv_heads": 2, "block": "parallel"},
    {"moe": MoEConfig(4, 2, 24, shared=DenseMLP(8))},
]


def score(model: bass.models.Model) -> np.ndarray:
    """Returns the logits of two texts."""
    positions = np.tile(np.arange(TOKENS.shape[1], dtype=np.int32), (2, 1))
    return np.asarray(jax.jit(bass.models.Model.forward)(model, TOKENS, positions, model.init_cache(2, 64))[0])


def dequantized(model: bass.models.Model) -> bass.models.Model:
    """Returns the model without quantization whose weights are the dequantized ones of `model`."""
    stored = flatten_dict(model.params, sep="/")
    params = {
        path: dequantize_weight(leaf, stored[f"{path}_scale"]) if f"{path}_scale" in stored else leaf
        for path, leaf in stored.items()
        if not path.endswith("_scale")
    }
    config = dataclasses.replace(model.config, quantize=None)
    return bass.models.Model(unflatten_dict(params, sep="/"), config, model.output_ids)


@pytest.mark.parametrize(("name", "shape"), [("qkv", (2, 3, 8, 16)), ("out", (16, 2, 3, 4)), ("down", (16, 24))])
def test_the_error_of_a_weight_is_at_most_half_a_scale(name, shape):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight[0] = 0.0
    values, scale = quantize_weight(jnp.asarray(weight), NUM_CONTRACTED[name])
    assert values.dtype == jnp.int8 and scale.shape == shape[: -NUM_CONTRACTED[name]]
    assert np.abs(np.asarray(values)).max() == 127
    assert (
        np.abs(dequantize_weight(values, scale) - weight) <= dequantize_weight(np.ones(shape), scale) * 0.5001
    ).all()


@pytest.mark.parametrize("changes", mostly_slow(SHAPES, lambda changes: changes == SHAPES[4]))
def test_logits_are_those_of_the_dequantized_weights(changes):
    model = tiny.model(0, vocab_size=40, num_layers=1, **changes)
    quantized = bass.models.quantize_model(model)
    assert quantized.params["layer_0"]["attention"]["qkv"].dtype == jnp.int8
    found, expected = score(quantized), score(dequantized(quantized))
    assert relative_error(found, expected) < 1e-5


def test_rounded_inputs_are_multiplied_as_integers():
    """Compared with the product of the dequantized values."""
    random = np.random.default_rng(1)
    x, w = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((2, 3, 64), (2, 8, 64)))
    weight = Weight(*quantize_weight(w, 1))
    size = jnp.abs(x).max(axis=-1, keepdims=True) / 127
    expected = jnp.einsum("btd,gfd->btgf", jnp.round(x / size) * size, dequantize_weight(*weight))
    found = multiply(x, weight, rounds_to="int8", factor=jnp.full((2, 3), 2.0))
    np.testing.assert_allclose(found, 2 * expected, atol=1e-4)
    assert 1e-3 < relative_error(np.asarray(found) / 2, np.asarray(jnp.einsum("btd,gfd->btgf", x, w))) < 0.05


def test_rounding_the_activations_changes_logits_little():
    model = tiny.model(0, scale=4.0, vocab_size=40, num_layers=1)
    errors = {
        mode: relative_error(score(bass.models.quantize_model(model, mode)), score(model))
        for mode in ("int8", "int8_activations")
    }
    assert 0 < errors["int8"] < errors["int8_activations"] < 0.1


def test_an_int8_cache_holds_rounded_keys_and_values():
    model = tiny.model(0, scale=4.0, vocab_size=40, num_layers=1)
    rounded = dataclasses.replace(model, config=dataclasses.replace(model.config, cache_dtype="int8"))
    tokens, positions = jnp.asarray(TOKENS[:1]), jnp.arange(12)[None]
    logits, cache, *_ = jax.jit(bass.models.Model.forward)(model, tokens, positions, model.init_cache(1, 64))
    found, int8, *_ = jax.jit(bass.models.Model.forward)(rounded, tokens, positions, rounded.init_cache(1, 64))
    assert isinstance(int8.keys[0], Int8KV) and int8.capacity == cache.capacity == 64
    # The first layer has the same inputs in both models.
    for held, exact in ((int8.keys[0], cache.keys[0]), (int8.values[0], cache.values[0])):
        error = np.abs(held.values * held.scales[..., None] - exact)
        assert (error <= np.asarray(held.scales)[..., None] * 0.5001 + 1e-6).all() and error.max() > 0
    assert 0 < relative_error(found, np.asarray(logits)) < 0.05
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(int8)) < 0.4 * sum(
        leaf.nbytes for leaf in jax.tree.leaves(cache)
    )


@pytest.mark.parametrize(
    ("quantize", "cache_dtype"), [("int8", "int8"), pytest.param("int8_activations", None, marks=pytest.mark.slow)]
)
def test_greedy_speculation_is_greedy_decoding(quantize, cache_dtype):
    """With an INT8 target and a float draft that is often accepted."""
    whole = tiny.model(0, num_layers=1)
    target = bass.models.quantize_model(whole, quantize, cache_dtype=cache_dtype)
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(whole, 0.02)))
    runs = [
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(3), max_new_tokens=24, step=step)
        for step in ("speculate", "decode")
    ]
    for speculated, decoded in zip(*(run.tokens for run in runs), strict=True):
        np.testing.assert_array_equal(speculated, decoded)
    assert runs[0].metrics.acceptance_rate > 0.3


@pytest.mark.slow
def test_candidate_drafts_with_an_int8_cache():
    whole = tiny.model(0, num_layers=1)
    target = bass.models.quantize_model(whole, cache_dtype="int8")
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(whole, 0.1)))
    candidates = bass.generate(
        pair, tiny.PROMPTS, bass.SpecConfig(3, "multi_draft", num_candidates=2), max_new_tokens=16
    )
    alone = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(3), max_new_tokens=16, step="decode")
    for found, expected in zip(candidates.tokens, alone.tokens, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_random_int8_weights_have_the_deviation_of_other_weights():
    config = tiny.config(width=64, num_layers=1, mlp_width=256, quantize="int8")
    params = bass.models.random_model(config, jax.random.key(0)).params["layer_0"]["mlp"]
    weight = np.asarray(dequantize_weight(params["down"], params["down_scale"]))
    # With 16384 numbers the standard errors are half a percent of the deviation, and 0.00016 for the mean.
    assert abs(weight.std() - 0.02) < 5e-4 and abs(weight.mean()) < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantize": "int4"}, "quantize='int4': expected one of None, 'int8', 'int8_activations'"),
        ({"cache_dtype": "fp8"}, "cache_dtype='fp8': expected one of None, 'int8'"),
        ({"product_dtype": "float16"}, "product_dtype='float16': expected one of None, 'bfloat16'"),
    ],
)
def test_errors_name_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(**changes)
    with pytest.raises(ValueError, match="expected one without INT8 weights"):
        bass.models.quantize_model(bass.models.quantize_model(tiny.model(0)))


@pytest.mark.slow
def test_speculation_samples_from_the_quantized_targets_distribution():
    target = bass.models.quantize_model(tiny.model(0, vocab_size=5), cache_dtype="int8")
    drafter = tiny.model_drafter(tiny.perturbed(tiny.model(0, vocab_size=5), 0.05), vocab_size=5)
    report = bass.verify_lossless(drafter, "token", target=target, num_samples=50_000)
    assert report.is_lossless, str(report)
