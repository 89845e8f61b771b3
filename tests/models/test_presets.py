"""Presets have the sizes of the models that they are named after; random weights are created on their devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

import bass_jax as bass
from bass_jax.checkpoint import inspect_preset
from bass_jax.models import PRESETS, init_params, param_shapes, preset, random_model
from bass_jax.models.sharding import param_shardings
from tests import tiny
from tests.marks import mostly_slow

NUM_PARAMETERS = {
    "opt-13b": 12_853_473_280,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "codegen-16b": 16_032_155_648,
    "codegen-350m": 356_712_448,
    "bass-7.8b": 7_862_157_312,
    "bass-draft-a-310m": 306_294_784,
    "bass-draft-b-510m": 507_727_872,
    "bass-draft-c-1b": 1_015_242_752,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "llama-7b": 6_738_415_616,
    "llama-160m": 162_417_408,
    "llama-2-7b": 6_738_415_616,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "deepseek-v2-lite": 15_706_484_224,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gpt2": 124_439_808,
    "starcoder": 15_517_456_384,
    "pythia-160m": 162_322_944,
    "pythia-6.9b": 6_857_302_016,
}
"""The numbers that `transformers` reports for the same configurations."""


def count(config: bass.models.ModelConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in param_shapes(config).values())


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["smollm2-135m", "gemma-2-2b", "gpt2", "opt-350m", "codegen-350m", "qwen3-0.6b"],
        lambda name: name in ("smollm2-135m", "gemma-2-2b", "opt-350m"),
    ),
)
def test_param_shapes_are_those_of_init_params(name):
    """`param_shapes` traces one layer of each kind. Twelve layers are enough to check the order of the names."""
    config = shallow(preset(name), 12)
    whole = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    expected = [(name, leaf.shape, leaf.dtype) for name, leaf in flatten_dict(whole, sep="/").items()]
    found = [(name, leaf.shape, leaf.dtype) for name, leaf in param_shapes(config).items()]
    assert found == expected


def shallow(config: bass.models.ModelConfig, num_layers: int) -> bass.models.ModelConfig:
    return dataclasses.replace(config, layers=config.layers[:num_layers])


@pytest.mark.slow
def test_every_preset_has_the_parameters_of_its_model():
    """Counts one layer of each kind, because tracing forty layers takes seconds."""
    found = {}
    for name in PRESETS:
        config = preset(name)
        last = config.layers[-1]  # A recurrent layer cannot be the only one.
        one = count(dataclasses.replace(config, layers=(last,)))
        sizes = {kind: count(dataclasses.replace(config, layers=(kind, last))) - one for kind in set(config.layers)}
        found[name] = one - sizes[last] + sum(sizes[layer] for layer in config.layers)
    assert found == NUM_PARAMETERS
    assert inspect_preset("bass-draft-b-510m").num_parameters == NUM_PARAMETERS["bass-draft-b-510m"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bass-draft-a-310m", (4, 16, 2048)),
        ("bass-draft-b-510m", (8, 16, 2048)),
        ("bass-draft-c-1b", (4, 32, 4096)),
    ],
)
def test_drafts_of_the_bass_paper(name, shape):
    """The shape is the number of layers, the number of heads, and the width."""
    config = preset(name)
    assert (config.num_layers, config.layers[0].attention.num_heads, config.width) == shape
    assert config.dtype == "bfloat16"
    assert config.vocab_size == preset("bass-7.8b").vocab_size


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"name='opt-66b': expected one of 'opt-13b', .*; did you mean 'opt-6.7b'"):
        preset("opt-66b")
    with pytest.raises(ValueError, match=r"name='opt-66b': expected one of"):
        bass.decoding.random_pair("opt-66b")


def test_random_weights_are_independent_with_the_given_deviation():
    changes = {"has_attention_bias": True, "norm_offset": 1.0, "dtype": "bfloat16"}
    config = tiny.config(width=64, num_layers=2, mlp_width=96, **changes)
    model = random_model(config, jax.random.key(3))
    arrays = flatten_dict(model.params, sep="/")
    assert {name: leaf.shape for name, leaf in arrays.items()} == {
        name: leaf.shape for name, leaf in param_shapes(config).items()
    }
    for name, leaf in arrays.items():
        assert leaf.dtype == jnp.bfloat16
        numbers = np.asarray(leaf, np.float64)
        if name.endswith(("norm", "bias")):
            assert not numbers.any()
        else:
            # The bounds are five standard errors of the standard deviation and of the mean.
            assert abs(numbers.std() - 0.02) < 5 * 0.02 / math.sqrt(2 * numbers.size) + 1e-4
            assert abs(numbers.mean()) < 5 * 0.02 / math.sqrt(numbers.size) + 1e-4
    first, second = (np.asarray(arrays[f"layer_{i}/mlp/down"], np.float32) for i in range(2))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
    again = random_model(config, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.slow
def test_no_norm_of_a_random_hybrid_is_zero():
    """The norms of the recurrent results have no offset, unlike those of the layers."""
    config = preset("qwen3.5-35b-a3b")
    layers = (config.layers[0], config.layers[3])
    config = dataclasses.replace(config, layers=layers, width=16, vocab_size=32, context=64)
    params = flatten_dict(random_model(config, jax.random.key(0)).params, sep="/")
    assert float(params["layer_0/attention_norm"].max()) == 0.0 and config.layers[0].norm.offset == 1.0
    assert float(params["layer_0/gated_delta/norm"].min()) == 1.0


@pytest.mark.slow
def test_random_weights_on_a_mesh_are_sharded_and_unchanged():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    config = tiny.config(num_kv_heads=2, vocab_size=12)
    model = random_model(config, jax.random.key(0), mesh=mesh)
    expected = param_shardings(config, mesh)
    for leaf, sharding in zip(jax.tree.leaves(model.params), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding == sharding
    assert model.params["embedding"].addressable_shards[0].data.shape == (6, 16)
    whole = random_model(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, model.params, whole.params)


@pytest.mark.slow
def test_a_random_pair_generates():
    target, draft = tiny.config(), tiny.config(num_layers=1, output_vocab_size=7)
    pair = bass.decoding.random_pair(target, draft)
    assert pair.target.config == target and pair.drafter.model.config == draft
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(2), max_new_tokens=6)
    assert [len(row) for row in run.tokens] == [6, 6, 6]
    assert isinstance(bass.decoding.random_pair(target).drafter, bass.drafters.NgramDrafter)
