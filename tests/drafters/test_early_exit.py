"""The target's first layers as its drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import NgramDrafter, early_exit_drafter, find_drafter
from bass_jax.testing import verify_lossless
from tests import tiny
from tests.decoding.test_caches import PLANS, advance, assert_caches_are_correct, start
from tests.models import own_models


@pytest.fixture(scope="module")
def target():
    return tiny.model(1, num_layers=4)


def test_the_weights_are_the_targets_arrays(target):
    draft = find_drafter("early_exit(num_layers=2)", target).model
    assert draft.config.num_layers == 2 and draft.config.layers == target.config.layers[:2]
    assert set(draft.params) == {"embedding", "head", "final_norm", "layer_0", "layer_1"}
    own = {id(leaf) for leaf in jax.tree.leaves(target.params)}
    assert all(id(leaf) in own for leaf in jax.tree.leaves(draft.params))
    assert early_exit_drafter(target).model.config.num_layers == 1


def test_the_logits_are_those_of_the_targets_hidden_states(target):
    draft = early_exit_drafter(target, 2).model
    tokens, positions = jnp.asarray([[3, 1, 4, 1, 5]]), jnp.arange(5, dtype=jnp.int32)[None]
    found = draft.forward(tokens, positions, draft.init_cache(1, 64))
    hidden = target.forward(tokens, positions, target.init_cache(1, 64), hidden_layers=(2,)).hidden
    normed = hidden / np.sqrt(np.mean(np.square(hidden), axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found.logits, target.logits(normed * target.params["final_norm"]), atol=1e-3)


@pytest.mark.slow
def test_the_output_is_that_of_regular_decoding(target):
    pair = bass.Pair(target, early_exit_drafter(target, 2))
    regular = bass.generate(pair.with_drafter(NgramDrafter()), tiny.PROMPTS, step="decode", max_new_tokens=(40, 37, 40))
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(3, "greedy"), max_new_tokens=(40, 37, 40))
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular.tokens]
    assert run.metrics.num_accepted > 0


@pytest.mark.slow
def test_both_caches_are_correct(target):
    pair = bass.Pair(target, early_exit_drafter(target, 2))
    state, _ = advance(pair, start(pair), PLANS["mixed"])
    assert_caches_are_correct(pair, state)


@pytest.mark.slow
@pytest.mark.optimized
def test_it_keeps_the_targets_distribution():
    target = tiny.model(1, vocab_size=5, num_layers=2)
    assert verify_lossless("early_exit(num_layers=1)", target=target, num_samples=60_000).p_value > 1e-5


@pytest.mark.parametrize("num_layers", [0, 5])
def test_a_wrong_number_of_layers_is_refused(target, num_layers):
    with pytest.raises(ValueError, match=f"num_layers={num_layers}"):
        early_exit_drafter(target, num_layers)


def test_another_model_is_refused():
    with pytest.raises(ValueError, match=r"expected a bass_jax\.models\.Model for drafter='early_exit'"):
        early_exit_drafter(own_models.plain_model(5, 0))
