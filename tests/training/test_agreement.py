"""Block efficiency from teacher forcing against speculation step by step."""

import jax
import numpy as np
import pytest

from bass_jax.training.agreement import accepted_runs, measure_agreement, teacher_forced
from bass_jax.training.rollout import roll_out
from tests.training.conftest import VOCAB, next_token


def _speculate(draft, rollout, draft_len):
    """Emitted tokens per pass: drafts from the draft's own earlier drafts, compared with the target's tokens."""
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
def test_runs_equal_speculation_step_by_step(make_config, make_draft, target, draft_len):
    # Breaking it: counting the bonus token of a full acceptance into the next run.
    config = make_config(draft={"output_vocab_size": 40})
    draft = make_draft(config, np.arange(10, 50, dtype=np.int32))
    prompts = [np.array([5, 9, 31], np.int32), np.array([7, 1], np.int32)]
    rollouts = roll_out(
        target, prompts, temperatures=[0.0, 0.0], key=jax.random.key(0), max_new_tokens=12, stop_ids=(), top=4
    )
    # A draft that never agrees proves nothing: let it draft the target's own head now and then.
    rollouts = [row._replace(response=_mixed(draft, row)) for row in rollouts]
    matches = list(teacher_forced(draft, rollouts))
    for row, agrees in zip(rollouts, matches, strict=True):
        assert agrees.any() and not agrees.all()
        assert accepted_runs(agrees, draft_len).tolist() == _speculate(draft, row, draft_len)
    passes = sum(len(_speculate(draft, row, draft_len)) for row in rollouts)
    measured = measure_agreement(draft, rollouts, draft_len)
    assert measured.block_efficiency == pytest.approx(measured.num_tokens / passes)


def _mixed(draft, row):
    """A response that follows the draft except at every fifth token."""
    response = []
    for index in range(len(row.response)):
        token = next_token(draft, row.prompt.tolist() + response)
        response.append((token + 1) % VOCAB if index % 5 == 4 else token)
    return np.array(response, np.int32)


def test_extremes():
    assert accepted_runs(np.zeros(3, bool), 4).tolist() == [1, 1, 1]
    assert accepted_runs(np.ones(10, bool), 4).tolist() == [5, 5]
    assert accepted_runs(np.ones(7, bool), 4).tolist() == [5, 2]
    assert accepted_runs(np.array([True, False, True, True]), 2).tolist() == [2, 2]


def test_sampled_rollouts_are_refused(make_config, make_draft, target):
    rollouts = roll_out(
        target, [np.array([1, 2])], temperatures=[0.5], key=jax.random.key(0), max_new_tokens=3, stop_ids=(), top=4
    )
    with pytest.raises(ValueError, match="greedy"):
        measure_agreement(make_draft(make_config()), rollouts, 4)
