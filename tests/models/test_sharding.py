"""A model sharded over a mesh has the logits of the model on one device."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from bass_jax.checkpoint import load_model, save_model
from bass_jax.models.sharding import param_shardings
from tests.checkpoint.small import random_model, small_config
from tests.models.passes import read_texts, relative_error

TEXTS = [np.random.default_rng(i).integers(0, 264, n) for i, n in enumerate((21, 34, 16))]
BIASES = {"has_attention_bias": True, "has_mlp_bias": True, "is_tied": False}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tp"))


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"num_kv_heads": 2}, None),
        pytest.param(BIASES, {"kv_heads": "tp", "mlp": "data", "vocab": "tp"}, marks=pytest.mark.slow),
        pytest.param(BIASES, {"embed": "tp"}, marks=pytest.mark.slow),
        pytest.param({"is_tied": False, "embedding_width": 24, "output_vocab_size": 40}, None, marks=pytest.mark.slow),
    ],
)
def test_sharded_logits_equal_those_of_one_device(changes, rules, mesh, tmp_path):
    model = random_model(small_config(**changes))
    save_model(tmp_path / "model", model)
    sharded = load_model(tmp_path / "model", mesh=mesh, rules=rules)
    for leaf, sharding in zip(
        jax.tree.leaves(sharded.params), jax.tree.leaves(param_shardings(model.config, mesh, rules)), strict=True
    ):
        assert leaf.sharding == sharding
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(sharded.params))
    for found, expected in zip(read_texts(sharded, TEXTS), read_texts(model, TEXTS), strict=True):
        assert relative_error(found, expected) < 1e-5


def test_default_shardings_are_those_of_megatron(mesh):
    shardings = param_shardings(small_config(is_tied=False), mesh)
    layer = shardings["layer_0"]
    assert layer["attention"]["qkv"].spec == PartitionSpec("tp", None, None, None)
    assert layer["attention"]["out"].spec == PartitionSpec(None, "tp", None, None)
    assert layer["mlp"]["gate_up"].spec == PartitionSpec(None, "tp", None)
    assert layer["mlp"]["down"].spec == PartitionSpec(None, "tp")
    assert shardings["embedding"].spec == shardings["head"].spec == PartitionSpec("tp", None)
    assert layer["attention_norm"].spec == PartitionSpec(None)


def test_an_invalid_rule_is_refused(mesh, tmp_path):
    config = small_config(vocab_size=263)
    with pytest.raises(ValueError, match="rules: unknown logical axis 'heads'"):
        param_shardings(config, mesh, {"heads": "tp"})
    with pytest.raises(ValueError, match="rules: mesh has no axis 'model'"):
        param_shardings(config, mesh, {"mlp": "model"})
    message = "embedding: axis 'vocab' of size 263 does not divide over 2 devices of mesh axis 'tp'"
    save_model(tmp_path / "model", random_model(config))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "model", mesh=mesh)
