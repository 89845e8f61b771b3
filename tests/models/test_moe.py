"""Experts: routers, no influence of one token on another, and experts sharded over a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

import bass_jax as bass
from bass_jax.checkpoint import load_model, save_hugging_face
from bass_jax.drafters import ModelDrafter
from bass_jax.models import DenseMLP, MoEConfig, place_model, tensor_parallel_mesh
from bass_jax.models.moe import Routing, route, run_experts
from bass_jax.models.weights import Weight
from bass_jax.testing import verify_lossless
from tests import tiny
from tests.checkpoint.small import random_model, small_config
from tests.models.passes import read_texts, relative_error

MOE = MoEConfig(6, 2, 16)
ROUTERS = {
    "softmax": {"is_normalized": False},
    "softmax-normalized": {},
    "all-experts": {"num_active": 6},
    "sigmoid": {"score": "sigmoid", "is_normalized": False},
    "sigmoid-choice-bias-scaled": {"score": "sigmoid", "has_choice_bias": True, "scale": 2.5},
    "groups": {"score": "sigmoid", "has_choice_bias": True, "num_groups": 3, "num_active_groups": 1},
    "two-of-three-groups": {"num_groups": 3, "num_active_groups": 2, "num_active": 3},
    "groups-by-maximum": {"is_normalized": False, "num_groups": 3, "num_active_groups": 2, "num_group_scores": 1},
}


def expected_factors(moe: MoEConfig, logits: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Returns the factor of every expert of one token, 0 for those that are not chosen."""
    exp = np.exp(logits)
    scores = exp / exp.sum() if moe.score == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores + bias if moe.has_choice_bias else scores
    groups = np.arange(moe.num_experts) // (moe.num_experts // moe.num_groups)
    sums = [np.sort(choice[groups == group])[-moe.num_group_scores :].sum() for group in range(moe.num_groups)]
    kept = np.argsort(sums)[-moe.num_active_groups :]
    allowed = [expert for expert in range(moe.num_experts) if groups[expert] in kept]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: moe.num_active]
    factors = np.zeros(moe.num_experts)
    factors[chosen] = scores[chosen]
    return moe.scale * (factors / factors.sum() if moe.is_normalized else factors)


@pytest.mark.parametrize("changes", ROUTERS.values(), ids=ROUTERS)
def test_experts_are_chosen_and_weighted_by_the_definition(changes):
    moe, draw = dataclasses.replace(MOE, **changes), np.random.default_rng(3)
    logits, bias = draw.normal(size=(50, 6)).astype(np.float32), draw.normal(size=6).astype(np.float32)
    found = np.zeros((50, 6))
    routing = route(moe, jnp.asarray(logits), jnp.asarray(bias) if moe.has_choice_bias else None)
    np.put_along_axis(found, np.asarray(routing.experts), np.asarray(routing.factors), axis=1)
    expected = np.stack([expected_factors(moe, row, bias) for row in logits])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.fixture(scope="module")
def layer():
    """Returns 16 tokens and the matrices of the experts."""
    draw = np.random.default_rng(0)
    tokens, gate_up, down = (
        jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((16, 8), (6, 2, 16, 8), (6, 8, 16))
    )
    return tokens, Weight(gate_up, None), Weight(down, None)


@functools.partial(jax.jit, static_argnums=0)
def run(moe, tokens, routing, gate_up, down, first=0):
    return run_experts(moe, tokens, routing, gate_up, None, down, first)


def test_the_output_is_the_sum_of_the_chosen_experts(layer):
    tokens, gate_up, down = layer
    draw = np.random.default_rng(1)
    experts = np.stack([draw.choice(6, 2, replace=False) for _ in range(16)]).astype(np.int32)
    factors = draw.random((16, 2)).astype(np.float32)
    found = run(MOE, tokens, Routing(experts, factors), gate_up, down)
    for token, chosen, weights, row in zip(np.asarray(tokens), experts, factors, np.asarray(found), strict=True):
        expected = 0
        for expert, factor in zip(chosen, weights, strict=True):
            gate, up = np.asarray(gate_up.values[expert]) @ token
            expected += factor * np.asarray(down.values[expert]) @ (gate / (1 + np.exp(-gate)) * up)
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)


def test_factors_on_the_inputs_are_those_of_scaled_tokens(layer):
    tokens, gate_up, down = layer
    experts = np.random.default_rng(1).integers(0, 6, (16, 1)).astype(np.int32)
    factors = np.random.default_rng(2).random((16, 1)).astype(np.float32)
    found = run(dataclasses.replace(MOE, scales_input=True), tokens, Routing(experts, factors), gate_up, down)
    expected = run(MOE, tokens * factors, Routing(experts, np.ones_like(factors)), gate_up, down)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_token_does_not_change_the_output_of_another(layer):
    """The last bit included, also if all other tokens choose its experts."""
    tokens, gate_up, down = layer
    draw, outputs = np.random.default_rng(2), []
    for others in (None, 0, 5):
        experts = np.stack([draw.choice(6, 2, replace=False) for _ in range(16)]).astype(np.int32)
        if others is not None:
            experts[:] = [others, (others + 1) % 6]
        experts[7] = [0, 1]
        routing = Routing(experts, jnp.full((16, 2), 0.5))
        noise = jnp.asarray(draw.normal(size=tokens.shape), jnp.float32).at[7].set(tokens[7])
        outputs.append(np.asarray(run(MOE, noise, routing, gate_up, down)[7]))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_parts_of_the_experts_add_up(layer):
    tokens, gate_up, down = layer
    routing = route(MOE, jnp.asarray(np.random.default_rng(4).normal(size=(16, 6)), jnp.float32))
    whole = run(MOE, tokens, routing, gate_up, down)
    parts = [
        run(MOE, tokens, routing, Weight(gate_up.values[i : i + 2], None), Weight(down.values[i : i + 2], None), i)
        for i in (0, 2, 4)
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)


LIMITED = MoEConfig(4, 2, 24, has_bias=True, gate_limit=0.5)
SHARED = MoEConfig(4, 2, 24, shared=DenseMLP(8), has_shared_gate=True)


@pytest.mark.slow
@pytest.mark.parametrize(("expert_parallel", "moe"), [(2, SHARED), (4, MoEConfig(4, 2, 24)), (2, LIMITED)])
def test_experts_on_a_mesh_give_the_logits_of_one_device(expert_parallel, moe):
    """A tiny Qwen3-MoE: norms of queries and keys, experts over ``ep``, heads and widths over ``tp``."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    model = random_model(small_config(num_kv_heads=2, has_qk_norm=True, moe=moe, family="qwen3_moe"))
    mesh = tensor_parallel_mesh(4, expert_parallel=expert_parallel)
    sharded = place_model(model, mesh)
    stored = sharded.params["layer_0"]["mlp"]
    assert stored["experts_gate_up"].sharding.spec == PartitionSpec("ep", None, "tp", None)
    assert stored["experts_down"].sharding.spec == PartitionSpec("ep", None, "tp")
    shape = stored["experts_down"].sharding.shard_shape((4, 16, 24))
    assert shape == (4 // expert_parallel, 16, 24 * expert_parallel // 4)
    texts = [np.random.default_rng(i).integers(0, 264, n) for i, n in enumerate((21, 34))]
    for found, expected in zip(read_texts(sharded, texts), read_texts(model, texts), strict=True):
        assert relative_error(found, expected) < 1e-5


@pytest.mark.slow
def test_experts_on_a_mesh_with_one_axis_are_split_by_width():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    model = random_model(small_config(num_kv_heads=2, num_layers=1, moe=MoEConfig(3, 2, 24)))
    sharded = place_model(bass.models.quantize_model(model), tensor_parallel_mesh(2))
    assert sharded.config.expert_axes == (None, "tp")
    text = [np.random.default_rng(0).integers(0, 264, 20)]
    (found,), (expected,) = read_texts(sharded, text), read_texts(bass.models.quantize_model(model), text)
    assert relative_error(found, expected) < 1e-5


def test_an_invalid_mesh_is_refused():
    with pytest.raises(ValueError, match="expert_parallel=3: expected a divisor of the number of devices, 1"):
        tensor_parallel_mesh(1, expert_parallel=3)


def test_experts_that_are_fused_in_the_file_are_read(tmp_path):
    """`transformers` 5 keeps the experts of a layer in two tensors, which some files hold."""
    model = random_model(small_config(num_kv_heads=2, has_qk_norm=True, moe=MOE, family="qwen3_moe", norm_eps=1e-6))
    save_hugging_face(tmp_path / "model", model)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for i in range(model.config.num_layers):
        theirs = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{theirs}.{e}.{name}_proj.weight") for e in range(6)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{theirs}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{theirs}.down_proj": down}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    found = load_model(tmp_path / "model")
    assert found.config == model.config
    jax.tree.map(np.testing.assert_array_equal, found.params, model.params)
    del tensors["model.layers.0.mlp.experts.down_proj"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensor 'model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight'"):
        load_model(tmp_path / "model")


def test_orbax_restores_experts(tmp_path):
    import orbax.checkpoint as ocp

    params = tiny.model(0, moe=SHARED).params
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "params", jax.eval_shape(lambda: params))
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_the_logits_of_a_row_have_the_same_bits_whatever_the_other_rows_hold():
    target, draw = tiny.model(1, moe=MOE, num_layers=2), np.random.default_rng(0)
    positions = jnp.broadcast_to(jnp.arange(5), (4, 5))
    read = jax.jit(lambda tokens: target.forward(tokens, positions, target.init_cache(4, 8)).logits)
    tokens = draw.integers(tiny.VOCAB, size=(4, 5))
    expected = np.asarray(read(tokens))[1]
    for _ in range(5):
        others = draw.integers(tiny.VOCAB, size=(4, 5))
        others[1] = tokens[1]
        np.testing.assert_array_equal(np.asarray(read(others))[1], expected)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_other_rows():
    """Speculation and regular decoding of one row, alone and with every other row, in every slot."""
    target = tiny.model(1, moe=MOE, num_layers=2)
    pair = bass.Pair(target, ModelDrafter(tiny.perturbed(target, 0.2), tiny.VOCAB))
    prompts = [*tiny.PROMPTS, [2, 4, 6, 8, 10]]
    for options in ({"step": "decode"}, {"spec": bass.SpecConfig(4)}):
        together = bass.generate(pair, prompts, max_new_tokens=24, **options).tokens
        backwards = bass.generate(pair, prompts[::-1], max_new_tokens=24, **options).tokens[::-1]
        alone = [bass.generate(pair, [prompt], max_new_tokens=24, **options).tokens[0] for prompt in prompts]
        for found in zip(together, backwards, alone, strict=True):
            np.testing.assert_array_equal(found[0], found[1])
            np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.slow
def test_speculation_keeps_the_distribution_of_a_target_with_experts():
    target = tiny.model(1, 8.0, vocab_size=5, moe=dataclasses.replace(MOE, num_experts=4))
    draft = tiny.perturbed(target, 0.3)
    report = verify_lossless(ModelDrafter(draft, 5), target=target, num_samples=100_000)
    assert report.is_lossless
    assert report.tokens_per_step > 1.2
