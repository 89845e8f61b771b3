"""Drafting along answers that are there already, against speculation with the target."""

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.training.rollout import roll_out
from bass_jax.training.speculation import speculate_on
from tests import tiny

LIMIT = 24


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def rollouts(target):
    prompts = [np.array(prompt, np.int32) for prompt in tiny.PROMPTS]
    return roll_out(
        target, prompts, temperatures=[0.0] * 3, key=jax.random.key(0), max_new_tokens=LIMIT, stop_ids=(), top=4,
        keep_features=True,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["hidden", "combined", "combined with hidden"])
def test_it_counts_what_speculation_with_the_target_does(target, rollouts, kind):
    """Pass by pass: drafts, accepted drafts and tokens; features of a rollout are kept in 16 bits."""
    network = tiny.model_drafter(tiny.perturbed(target, 0.1)) if kind == "combined" else tiny.hidden_drafter(target)
    drafter = network if kind == "hidden" else tiny.combined_drafter(network)
    found = speculate_on(drafter, rollouts, 4, batch=2)
    pair = bass.Pair(target, drafter)
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4, "greedy"), max_new_tokens=LIMIT)
    for row, rollout in zip(run.tokens, rollouts, strict=True):
        np.testing.assert_array_equal(row, rollout.response)
    assert found.num_tokens == 3 * LIMIT == run.summary.num_emitted
    assert found.num_passes == sum(int(info.is_active.sum()) for info in run.infos)
    assert (found.num_drafted, found.num_accepted) == (run.summary.num_drafted, run.summary.num_accepted)
    assert found.block_efficiency == pytest.approx(run.summary.block_efficiency)


def test_rollouts_keep_the_targets_features(target, rollouts):
    for rollout in rollouts:
        sequence = np.concatenate([rollout.prompt, rollout.response[:-1]])
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(sequence)] = sequence
        positions = np.where(np.arange(64) < len(sequence), np.arange(64), 64)[None]
        fresh, _ = jax.jit(bass.Model.features)(target, *map(jax.numpy.asarray, (tokens, positions)),
                                                target.init_cache(1, 64))  # fmt: skip
        assert rollout.features.shape == (len(sequence), target.config.width)
        np.testing.assert_allclose(rollout.features, fresh[0, : len(sequence)], rtol=2**-9, atol=1e-3)


def test_what_cannot_be_measured_is_refused(target, rollouts):
    with pytest.raises(ValueError, match="at least one"):
        speculate_on(tiny.store_drafter(), [], 4)
    with pytest.raises(ValueError, match="greedy"):
        speculate_on(tiny.store_drafter(), [rollouts[0]._replace(temperature=1.0)], 4)
    with pytest.raises(ValueError, match="reads the target's features"):
        speculate_on(tiny.hidden_drafter(target), [rollouts[0]._replace(features=None)], 4)
