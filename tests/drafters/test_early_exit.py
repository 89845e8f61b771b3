"""The target's first layers as its drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import (
    EarlyExitDrafter,
    EnsembleDrafter,
    ModelDrafter,
    NgramDrafter,
    early_exit_drafter,
    early_exit_model,
    find_drafter,
)
from bass_jax.drafters.early_exit import first_layers
from bass_jax.testing import check_drafter, verify_lossless
from bass_jax.training.replay_speculation import speculate_on
from tests import tiny
from tests.decoding.test_caches import PLANS, advance, assert_is_prefix, start
from tests.marks import mostly_slow
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


def with_own_cache(target):
    """Returns the drafter of the same layers that keeps a cache of its own."""
    return ModelDrafter(first_layers(target, 2), target.vocab_size)


@pytest.fixture(scope="module")
def adapted(target):
    """A drafter with a random adapter."""
    random = np.random.default_rng(0)
    width = target.config.width
    mlp = {"gate_up": random.normal(size=(2, 12, width)), "down": 0.1 * random.normal(size=(width, 12))}
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), {"adapter": mlp, "adapter_norm": np.ones(width)})
    return EarlyExitDrafter(early_exit_model(target, 2, params), target.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("rule, num_candidates", [("greedy", 1), ("token", 1), ("multi_draft", 2)])
def test_the_drafts_are_those_of_a_cache_of_its_own(target, rule, num_candidates):
    """The target's cache holds what a cache of the same layers would hold, so every step has the same drafts."""
    spec = bass.SpecConfig(3, rule, num_candidates=num_candidates)
    sampling = bass.SamplingParams(temperature=0.0 if rule == "greedy" else 0.8)
    options = {"sampling": sampling, "max_new_tokens": (40, 37, 40)}
    pair = bass.Pair(target, early_exit_drafter(target, 2))
    run = bass.generate(pair, tiny.PROMPTS, spec, **options)
    own = bass.generate(pair.with_drafter(with_own_cache(target)), tiny.PROMPTS, spec, **options)
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in own.tokens]
    assert repr(run.metrics) == repr(own.metrics)  # By repr, because NaN is not equal to itself.
    assert run.metrics.num_accepted > 0
    if rule == "greedy":
        regular = bass.generate(pair.with_drafter(NgramDrafter()), tiny.PROMPTS, step="decode", **options)
        assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular.tokens]


@pytest.mark.slow
def test_an_adapter_changes_drafts_and_no_tokens(target, adapted):
    pair, spec = bass.Pair(target, adapted), bass.SpecConfig(3, "greedy")
    run, plain = (
        bass.generate(pair.with_drafter(drafter), tiny.PROMPTS, spec, max_new_tokens=40)
        for drafter in (adapted, early_exit_drafter(target, 2))
    )
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in plain.tokens]
    assert run.metrics.num_accepted != plain.metrics.num_accepted
    check_drafter(adapted, tiny.VOCAB, target=target)


@pytest.mark.parametrize("plan", mostly_slow(["mixed", "after regular"], lambda plan: plan == "mixed"))
def test_the_targets_cache_is_correct_and_there_is_no_other(target, plan):
    pair = bass.Pair(target, early_exit_drafter(target, 2))
    state, _ = advance(pair, start(pair), PLANS[plan])
    assert state.drafter_state is None
    assert_is_prefix(target, state.target_cache, state, state.lengths - 1)


@pytest.mark.slow
def test_a_part_of_an_ensemble_uses_the_targets_cache(target):
    """The other part's drafts are read when it is next needed, as by a drafter with a cache of its own."""
    runs = []
    for part in (early_exit_drafter(target, 2), with_own_cache(target)):
        pair = bass.Pair(target, EnsembleDrafter((NgramDrafter(3, 2), part)))
        runs.append(bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4, "greedy"), max_new_tokens=40))
    assert repr(runs[0].metrics) == repr(runs[1].metrics)
    with pytest.raises(ValueError, match="parts: expected at most one that uses the target's cache"):
        EnsembleDrafter((early_exit_drafter(target, 1), early_exit_drafter(target, 2)))


def test_the_layers_of_another_target_are_refused(target):
    pair = bass.Pair(tiny.model(1, num_layers=1), early_exit_drafter(target, 2))
    with pytest.raises(ValueError, match="drafter: it runs the first 2 layers of another target"):
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(2))
    with pytest.raises(ValueError, match="expected one without the target's cache"):
        speculate_on(pair.drafter, [], 4)


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
