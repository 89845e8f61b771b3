"""The roofline model: counts of bytes and FLOPs, the fit, and the findings of two papers on simulated devices.

The simulations use the assumptions of `bass_jax.cost_model.devices`. They are not measurements.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.cost_model import A100, H200, pass_shape, roofline
from bass_jax.cost_model.roofline import fit_roofline
from bass_jax.models import DenseMLP, MoEConfig, preset
from bass_jax.policies.batch_table import fastest_draft_len
from tests import tiny
from tests.flat_config import flat_config

OPT = {"vocab_size": 50272, "context": 2**17, "is_gated": False, "activation": "relu", "dtype": "bfloat16"}
OPT_6_7B = flat_config(width=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, mlp_width=16384, **OPT)
OPT_125M = flat_config(width=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64, mlp_width=3072, **OPT)
RATES = np.diff(0.9 * np.arange(9) ** 0.548)
RATES = jnp.asarray(RATES / np.concatenate([[1.0], RATES[:-1]]))
"""Acceptance rates by position of the fit of Su et al., ``0.9 s^0.548`` accepted drafts."""

LENGTHS = tuple(range(9))


def test_shapes_count_the_weights():
    """The counts equal those of the parameters without norms and without the embedding lookup."""
    for changes in ({}, {"is_tied": True}, {"embedding_width": 8}, {"output_vocab_size": 5}, {"is_gated": False}):
        config = tiny.config(**changes)
        params = jax.eval_shape(
            lambda key, config=config: bass.models.init_model(config, key).params, jax.random.key(0)
        )
        leaves = jax.tree.leaves_with_path(params)
        matrices = sum(leaf.size for path, leaf in leaves if "norm" not in jax.tree_util.keystr(path))
        lookup = 0 if config.is_tied else (config.embedding_width or config.width) * config.vocab_size
        assert pass_shape(config).weight_bytes == 4 * (matrices - lookup), changes
        assert pass_shape(config).flops == 2 * (matrices - lookup)
    # Bytes of a number, layers, keys and values, heads, head size.
    assert pass_shape(tiny.config(num_layers=2)).cache_bytes == 4 * 2 * 2 * 1 * 8
    assert pass_shape(OPT_6_7B).weight_bytes == pytest.approx(2 * 6.65e9, rel=0.01)


def test_experts_are_counted_as_read_once_by_the_tokens_that_chose_them():
    """The expectation is compared with random choices, and the counts with the parameters."""
    config = tiny.config(num_layers=2, moe=MoEConfig(16, 3, 24, shared=DenseMLP(8), has_shared_gate=True))
    shape = pass_shape(config)
    sizes = {name: leaf.size for name, leaf in bass.models.param_shapes(config).items()}
    experts = sum(size for name, size in sizes.items() if "experts_" in name)
    others = sum(size for name, size in sizes.items() if not any(part in name for part in ("experts_", "norm")))
    others -= config.width * config.vocab_size
    assert shape.expert_bytes == 4 * experts
    assert shape.weight_bytes == 4 * others
    assert shape.flops == 2 * (others + experts * 3 / 16)
    random = np.random.default_rng(0)
    for num_tokens in (1, 2, 5, 40):
        read = [
            len({expert for _ in range(num_tokens) for expert in random.choice(16, 3, replace=False)})
            for _ in range(2000)
        ]
        expected = shape.weight_bytes + shape.expert_bytes * np.mean(read) / 16
        assert shape.read_bytes(num_tokens) == pytest.approx(expected, rel=0.01)
    cost = roofline(shape, pass_shape(OPT_125M), dataclasses.replace(H200, layer_seconds=0.0))
    fitted = [(shape, rows, tokens, 64) for rows in (1, 4, 64, 512) for tokens in (1, 5)]
    flops, bandwidth, _ = fit_roofline([(*one, float(cost.pass_seconds(*one))) for one in fitted])
    assert bandwidth == pytest.approx(0.85 * H200.bandwidth, rel=1e-2)
    assert flops == pytest.approx(0.5 * H200.peak_flops, rel=5e-2)
    mixed = dataclasses.replace(
        config, layers=(config.layers[0], dataclasses.replace(config.layers[0], mlp=MoEConfig(16, 4, 24)))
    )
    with pytest.raises(ValueError, match="expected the same share of active experts in all layers"):
        pass_shape(mixed)


@pytest.mark.parametrize("device", [A100, H200])
def test_drafts_pay_less_for_a_target_with_experts_at_small_batches(device):
    """At batch 1 each draft makes the target read more experts. At large batches all experts are read anyway."""
    moe, draft = pass_shape(preset("qwen3-30b-a3b")), pass_shape(preset("qwen3-0.6b"))
    layer = preset("qwen3-30b-a3b").layers[0]
    dense = dataclasses.replace(
        preset("qwen3-30b-a3b"), layers=(dataclasses.replace(layer, mlp=DenseMLP(8 * 768)),) * 48
    )
    rates = jnp.full(12, 0.8)
    best = {
        name: [fastest_draft_len(roofline(shape, draft, device), rates, n, 512, tuple(range(13))) for n in (1, 32, 64)]
        for name, shape in {"moe": moe, "dense": pass_shape(dense)}.items()
    }
    assert best["moe"][0] < best["dense"][0]
    assert max(best["moe"][1:]) > best["moe"][0]


def test_the_fit_recovers_the_device():
    big, small = pass_shape(OPT_6_7B), pass_shape(OPT_125M)
    cost = roofline(big, small, H200)
    passes = [
        (shape, rows, tokens, context)
        for shape in (big, small)
        for rows in (1, 4, 16, 64)
        for tokens in (1, 5, 9)
        for context in (128, 4096)
    ]
    flops, bandwidth, layer = fit_roofline([(*one, float(cost.pass_seconds(*one))) for one in passes])
    assert flops == pytest.approx(0.5 * H200.peak_flops, rel=1e-3)
    assert bandwidth == pytest.approx(0.85 * H200.bandwidth, rel=1e-3)
    assert layer == pytest.approx(20e-6, rel=1e-3)


def test_catching_up_takes_passes():
    cost = roofline(pass_shape(OPT_6_7B), pass_shape(OPT_125M), H200)
    none, some = (float(cost.draft_seconds(1, 2, 100, behind)) for behind in (0, 17))
    assert some - none == pytest.approx(3 * float(cost.pass_seconds(cost.draft, 1, 8, 100)), rel=1e-4)
    assert float(cost.draft_seconds(1, 0, 100, 17)) == 0


@pytest.mark.parametrize("device", [A100, H200])
def test_the_best_length_decreases_with_the_batch_at_short_context(device):
    """Su et al.: 6 to 8 drafts at batch 1, at most 2 at batch 32."""
    cost = roofline(pass_shape(OPT_6_7B), pass_shape(OPT_125M), device)
    best = [fastest_draft_len(cost, RATES, batch, 128, LENGTHS) for batch in (1, 2, 4, 8, 16, 32)]
    assert best == sorted(best, reverse=True)
    assert 6 <= best[0] <= 8
    assert best[-1] <= 2


@pytest.mark.parametrize("device", [A100, H200])
def test_the_best_length_increases_with_the_context(device):
    """MagicDec: at long context, reading the caches takes most of the time. The draft model reads a window of them."""
    cost = roofline(pass_shape(OPT_6_7B), pass_shape(OPT_125M), device, draft_window=512)
    best = [fastest_draft_len(cost, RATES, 32, context, LENGTHS) for context in (128, 2048, 8192, 32768)]
    assert best == sorted(best)
    assert best[-1] >= 5
