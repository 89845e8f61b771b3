"""The arithmetic of the reports, against an example worked by hand."""

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.decoding.state import FinishReason, StepInfo

# Four rows: two that run to the end, one that stops early, one filler. Steps with buckets of 2, 4 and 1 drafts.
# row 0: drafted 2 accepted 2 (3 tokens); drafted 4 accepted 1 (2); drafted 1 accepted 0 (1)     6 tokens, 3 steps
# row 1: drafted 2 accepted 0 (1);        drafted 3 accepted 3, a stop cuts it after 2            3 tokens, 2 steps
# row 2: drafted 1 accepted 1 (2);        drafted 0 (1);              drafted 1 accepted 1 (2)    5 tokens, 3 steps
ACTIVE = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 1, 0]], bool)
DRAFTED = np.array([[2, 2, 1, 0], [4, 3, 0, 0], [1, 0, 1, 0]])
ACCEPTED = np.array([[2, 0, 1, 0], [1, 3, 0, 0], [0, 0, 1, 0]])
EMITTED = np.array([[3, 1, 2, 0], [2, 2, 1, 0], [1, 0, 2, 0]])
SECONDS = [0.5, 1.0, 2.0]


def infos() -> list[StepInfo]:
    def step(i, width):
        return StepInfo(
            is_active=ACTIVE[i], tokens=np.full((4, width), -1), num_emitted=EMITTED[i], num_accepted=ACCEPTED[i],
            num_drafted=DRAFTED[i], logprobs=np.zeros((4, width)), finish=np.full(4, FinishReason.RUNNING),
        )  # fmt: skip

    return [step(0, 3), step(1, 5), step(2, 2)]


def test_summary():
    summary = bass.summarize(infos())
    assert summary.num_steps == 3
    assert summary.num_row_steps == 8
    assert summary.num_drafted == 14
    assert summary.num_verified == 14 + 8
    assert summary.num_accepted == 8
    assert summary.num_rejected == 14 - 8
    assert summary.num_padded == 4 * (3 + 5 + 2) - (14 + 8)  # four rows of T positions, less those verified
    assert summary.num_emitted == 14
    assert summary.acceptance_rate == 8 / 14
    assert summary.block_efficiency == 14 / 8
    # Position 0: reached in 7 row steps with a draft, stood in 5; 1: drafted and reached in 3 (2, 4, 3), stood in 2;
    # 2: reached by row 1 alone (row 0's run of 4 ended at position 1), stood; 3: never reached.
    assert summary.acceptance_by_position[:3] == (5 / 7, 2 / 3, 1.0)
    assert np.isnan(summary.acceptance_by_position[3])
    assert len(summary.acceptance_by_position) == 4


def test_per_token_latency():
    """Row 1 finishes first (after 1.5 s, 3 tokens); rows 0 and 2 last (3.5 s, 6 and 5 tokens)."""
    latency = bass.per_token_latency(infos(), SECONDS)
    assert latency.first == pytest.approx(1.5 / 3)
    assert latency.last == pytest.approx(3.5 / 6)
    assert latency.all == pytest.approx(np.mean([3.5 / 6, 1.5 / 3, 3.5 / 5]))


def test_stacked_infos_add_up_alike():
    """As the device loop returns them, with steps that were not needed at the end."""
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
    assert repr(bass.summarize(stacked)) == repr(bass.summarize(infos()))  # repr: NaN equals itself


def test_without_drafts():
    none = [info._replace(num_drafted=np.zeros(4, int), num_accepted=np.zeros(4, int)) for info in infos()]
    summary = bass.summarize(none)
    assert summary.acceptance_by_position == ()
    assert np.isnan(summary.acceptance_rate)


def test_what_cannot_be_added_up_is_refused():
    with pytest.raises(ValueError, match="infos is empty"):
        bass.summarize([])
    with pytest.raises(ValueError, match="step_seconds has 2 values: expected 3"):
        bass.per_token_latency(infos(), [1.0, 2.0])
