"""Metrics of an example that was computed by hand."""

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.decoding.state import FinishReason, StepInfo

# Four rows: two run to the end, one stops early, and one is padding. The buckets of the steps are 2, 4 and 1.
# row 0: drafted 2 accepted 2 (3 tokens); drafted 4 accepted 1 (2); drafted 1 accepted 0 (1)     6 tokens, 3 steps
# row 1: drafted 2 accepted 0 (1);        drafted 3 accepted 3, and stops after 2 tokens          3 tokens, 2 steps
# row 2: drafted 1 accepted 1 (2);        drafted 0 (1);              drafted 1 accepted 1 (2)    5 tokens, 3 steps
ACTIVE = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 1, 0]], bool)
DRAFTED = np.array([[2, 2, 1, 0], [4, 3, 0, 0], [1, 0, 1, 0]])
ACCEPTED = np.array([[2, 0, 1, 0], [1, 3, 0, 0], [0, 0, 1, 0]])
EMITTED = np.array([[3, 1, 2, 0], [2, 2, 1, 0], [1, 0, 2, 0]])
SECONDS = [0.5, 1.0, 2.0]


def infos() -> list[StepInfo]:
    def step(i, width):
        return StepInfo(
            is_active=ACTIVE[i],
            tokens=np.full((4, width), -1),
            num_emitted=EMITTED[i],
            num_accepted=ACCEPTED[i],
            num_drafted=DRAFTED[i],
            logprobs=np.zeros((4, width)),
            finish=np.full(4, FinishReason.RUNNING),
        )

    return [step(0, 3), step(1, 5), step(2, 2)]


def test_a_summary_counts_tokens_and_drafts():
    summary = bass.summarize(infos())
    assert summary.num_steps == 3
    assert summary.num_row_steps == 8
    assert summary.num_drafted == 14
    assert summary.num_verified == 14 + 8
    assert summary.num_accepted == 8
    assert summary.num_rejected == 14 - 8
    assert summary.num_padded == 4 * (3 + 5 + 2) - (14 + 8)  # Four rows of T positions, without those verified.
    assert summary.num_emitted == 14
    assert summary.acceptance_rate == 8 / 14
    assert summary.tokens_per_pass == 14 / 8
    # Position 0 was reached in 7 row steps and accepted in 5; position 1 in 3 (2, 4 and 3 drafts) and 2; position 2 in
    # one (row 1; row 0 rejected a draft at position 1) and accepted; position 3 was never reached.
    assert summary.acceptance_by_position[:3] == (5 / 7, 2 / 3, 1.0)
    assert np.isnan(summary.acceptance_by_position[3])
    assert len(summary.acceptance_by_position) == 4


def test_latency_per_token_of_the_first_the_last_and_all_rows():
    """Row 1 finishes first, after 1.5 s and 3 tokens. Rows 0 and 2 finish after 3.5 s, with 6 and 5 tokens."""
    latency = bass.decoding.per_token_latency(infos(), SECONDS)
    assert latency.first == pytest.approx(1.5 / 3)
    assert latency.last == pytest.approx(3.5 / 6)
    assert latency.all == pytest.approx(np.mean([3.5 / 6, 1.5 / 3, 3.5 / 5]))


def test_stacked_infos_have_the_same_summary():
    """The device loop returns them stacked, with unused steps at the end."""
    stacked = StepInfo(
        is_active=np.concatenate([ACTIVE, np.zeros((2, 4), bool)]),
        tokens=np.zeros((5, 4, 5)),
        width=np.array([3, 5, 2, 5, 5]),
        num_emitted=np.concatenate([EMITTED, np.zeros((2, 4), int)]),
        num_accepted=np.concatenate([ACCEPTED, np.zeros((2, 4), int)]),
        num_drafted=np.concatenate([DRAFTED, np.zeros((2, 4), int)]),
        logprobs=np.zeros((5, 4, 5)),
        finish=np.zeros((5, 4), int),
    )
    assert repr(bass.summarize(stacked)) == repr(
        bass.summarize(infos())
    )  # By repr, because NaN is not equal to itself.


def test_without_drafts_there_is_no_acceptance_rate():
    none = [info._replace(num_drafted=np.zeros(4, int), num_accepted=np.zeros(4, int)) for info in infos()]
    summary = bass.summarize(none)
    assert summary.acceptance_by_position == ()
    assert np.isnan(summary.acceptance_rate)


def test_invalid_infos_are_refused():
    with pytest.raises(ValueError, match="infos is empty"):
        bass.summarize([])
    with pytest.raises(ValueError, match="step_seconds has 2 values: expected 3"):
        bass.decoding.per_token_latency(infos(), [1.0, 2.0])
