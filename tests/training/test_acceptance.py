"""The acceptance of sampled answers against distributions taken position by position."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.training.acceptance import measure_acceptance
from bass_jax.training.rollout import roll_out
from tests.training.conftest import VOCAB


def _sampled(target, temperature, seed=0):
    prompts = [np.array([5, 9, 31], np.int32), np.array([7, 1], np.int32)]
    return roll_out(
        target, prompts, temperatures=[temperature] * 2, key=jax.random.key(seed), max_new_tokens=10, stop_ids=(),
        top=VOCAB,
    )  # fmt: skip


def _distribution(model, tokens, temperature):
    """Over the whole vocabulary, after `tokens`."""
    positions = jnp.arange(len(tokens))[None]
    logits, *_ = model.forward(jnp.asarray(tokens)[None], positions, model.init_cache(1, 64))
    distribution = np.asarray(jax.nn.softmax(logits[0, -1] / temperature))
    if model.output_ids is None:
        return distribution
    whole = np.zeros(VOCAB)
    whole[np.asarray(model.output_ids)] = law
    return whole


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_it_is_the_mass_that_both_laws_share(make_config, make_draft, target, temperature):
    draft = make_draft(make_config(draft={"output_vocab_size": 40}), np.arange(10, 50, dtype=np.int32))
    draft = dataclasses.replace(draft, params=draft.params | {"head": 20 * draft.params["head"]})
    # Breaking it: the distributions at temperature 1, or one position too early.
    rollouts, shared = _sampled(target, temperature), []
    for row in rollouts:
        for place in range(len(row.response)):
            before = np.concatenate([row.prompt, row.response[:place]])
            p, q = (_distribution(model, before, temperature) for model in (target, draft))
            shared.append(np.minimum(p, q).sum())
    assert 0.05 < np.mean(shared) < 0.95 and np.ptp(shared) > 0.01
    assert measure_acceptance(draft, target, rollouts) == pytest.approx(np.mean(shared), abs=1e-5)


def test_a_target_accepts_itself(target):
    assert measure_acceptance(target, target, _sampled(target, 0.8)) == pytest.approx(1, abs=1e-5)


def test_greedy_answers_are_refused(target):
    rows = [row._replace(temperature=0.0) for row in _sampled(target, 1.0)]
    for wrong in (rows, []):
        with pytest.raises(ValueError, match="expected sampled ones"):
            measure_acceptance(target, target, wrong)
