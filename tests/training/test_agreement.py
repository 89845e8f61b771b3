"""Tokens per pass from teacher forcing against speculation step by step; acceptance against full distributions."""

import dataclasses

import jax
import numpy as np
import pytest

from bass_jax.training.agreement import accepted_runs, measure_agreement, sampled_acceptance, teacher_forced
from bass_jax.training.rollout import roll_out
from tests.training.conftest import VOCAB, last_logits, next_token, padded

PROMPTS = [np.array([5, 9, 31], np.int32), np.array([7, 1], np.int32)]


@pytest.fixture(scope="module")
def write(target):
    """Lets the target answer `PROMPTS` at a temperature."""

    def make(temperature, top=VOCAB):
        options = {"key": jax.random.key(0), "max_new_tokens": 10, "stop_ids": (), "top": top}
        return roll_out(target, PROMPTS, temperatures=[temperature] * 2, **options)

    return make


@pytest.fixture
def draft(make_config, make_draft):
    """A draft that proposes 40 of the 64 tokens."""
    return make_draft(make_config(draft={"output_vocab_size": 40}), np.arange(10, 50, dtype=np.int32))


def speculate(draft, rollout, draft_len):
    """Returns the emitted tokens per pass: drafts follow the draft's own earlier drafts and are compared one by one."""
    response, position, emitted = rollout.response.tolist(), 0, []
    while position < len(response):
        prefix = [*rollout.prompt.tolist(), *response[:position]]
        drafts = []
        for _ in range(draft_len):
            drafts.append(next_token(draft, prefix + drafts))
        accepted = 0
        while accepted < draft_len and response[position + accepted : position + accepted + 1] == [drafts[accepted]]:
            accepted += 1
        emitted.append(min(accepted + 1, len(response) - position))
        position += emitted[-1]
    return emitted


@pytest.mark.parametrize("draft_len", [1, 3, 4])
def test_runs_equal_speculation_step_by_step(draft, write, draft_len):
    # Breaking it: counting the bonus token of a full acceptance into the next run.
    rollouts = [row._replace(response=mixed_response(draft, row)) for row in write(0.0)]
    matches = list(teacher_forced(draft, rollouts))
    for row, agrees in zip(rollouts, matches, strict=True):
        assert agrees.any() and not agrees.all()
        assert accepted_runs(agrees, draft_len).tolist() == speculate(draft, row, draft_len)
    passes = sum(len(speculate(draft, row, draft_len)) for row in rollouts)
    measured = measure_agreement(draft, rollouts, draft_len)
    assert measured.tokens_per_pass == pytest.approx(measured.num_tokens / passes)


def mixed_response(draft, row):
    """A response that is the draft's except for every fifth token, so that some drafts are accepted."""
    response = []
    for index in range(len(row.response)):
        token = next_token(draft, row.prompt.tolist() + response)
        response.append((token + 1) % VOCAB if index % 5 == 4 else token)
    return np.array(response, np.int32)


def test_runs_of_full_and_no_agreement():
    assert accepted_runs(np.zeros(3, bool), 4).tolist() == [1, 1, 1]
    assert accepted_runs(np.ones(10, bool), 4).tolist() == [5, 5]
    assert accepted_runs(np.ones(7, bool), 4).tolist() == [5, 2]
    assert accepted_runs(np.array([True, False, True, True]), 2).tolist() == [2, 2]


def test_agreement_of_sampled_answers_is_refused(draft, write):
    with pytest.raises(ValueError, match="greedy"):
        measure_agreement(draft, write(0.5), 4)


def distribution(model, tokens, temperature):
    """Returns the distribution over the whole vocabulary after `tokens`."""
    probs = np.asarray(jax.nn.softmax(last_logits(model, padded(tokens), len(tokens)) / temperature))
    if model.output_ids is None:
        return probs
    whole = np.zeros(VOCAB)
    whole[np.asarray(model.output_ids)] = probs
    return whole


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_acceptance_is_the_overlap_of_both_distributions(draft, target, write, temperature):
    # Breaking it: the distributions at temperature 1, or one position too early.
    draft = dataclasses.replace(draft, params=draft.params | {"head": 10 * draft.params["head"]})
    rollouts, overlaps = write(temperature), []
    for row in rollouts:
        for place in range(len(row.response)):
            before = np.concatenate([row.prompt, row.response[:place]])
            p, q = (distribution(model, before, temperature) for model in (target, draft))
            overlaps.append(np.minimum(p, q).sum())
    assert 0.05 < np.mean(overlaps) < 0.95 and np.ptp(overlaps) > 0.01
    assert sampled_acceptance(draft, target, rollouts) == pytest.approx(np.mean(overlaps), abs=1e-5)


def test_a_target_accepts_its_own_drafts(target, write):
    assert sampled_acceptance(target, target, write(0.8)) == pytest.approx(1, abs=1e-5)


def test_acceptance_of_greedy_answers_is_refused(target, write):
    for wrong in (write(0.0), []):
        with pytest.raises(ValueError, match="expected sampled ones"):
            sampled_acceptance(target, target, wrong)
