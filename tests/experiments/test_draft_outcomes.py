"""Spans and outcomes of drafts, on steps written by hand."""

import numpy as np
import pytest

from bass_jax.decoding.state import DraftRecord, StepInfo
from bass_jax.experiments.draft_outcomes import accepted_spans, draft_outcomes, spans_to_html
from tests.letters import Letters

LOG = np.log(np.float32([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6]]))


def step(tokens, num_accepted, num_drafted, is_active=(True, True)) -> StepInfo:
    """Two rows, three drafts, of confidence 0.2, 0.3, 0.4."""
    tokens = np.int32(tokens)
    confidence = np.broadcast_to(np.float32([0.2, 0.3, 0.4]), (2, 3))
    drafts = DraftRecord(LOG, np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), confidence)
    counts = (np.int32(num_accepted), np.int32(num_drafted))
    num_emitted = (tokens >= 0).sum(axis=1).astype(np.int32)
    return StepInfo(
        np.array(is_active), tokens, num_emitted, *counts, np.zeros((2, 4), np.float32), np.zeros(2, np.int32), drafts
    )


# Row 0: two of three drafts are accepted; row 1: none of one. In the second step the limit cuts row 0 before its bonus.
INFOS = [
    step([[0, 1, 2, -1], [3, -1, -1, -1]], [2, 0], [3, 1]),
    step([[4, 5, -1, -1], [-1, -1, -1, -1]], [3, 0], [3, 0], (True, False)),
]


def test_spans_have_the_source_of_each_token():
    letters = Letters(26)
    sources = [("a", "draft"), ("b", "draft"), ("c", "target"), ("e", "draft"), ("f", "draft")]
    assert accepted_spans(INFOS, 0, letters) == sources
    assert accepted_spans(INFOS, 1, letters) == [("d", "target")]


def test_spans_keep_characters_whole_and_escape_them():
    """Two tokens make one character, which belongs to the second."""
    letters = Letters(6, chunks=(b"\xc3", b"\xa9", b"<", b"x", b"y", b"\xc3"))
    spans = accepted_spans(INFOS, 0, letters)
    assert [span.text for span in spans] == ["é", "<", "y", "\ufffd"]
    assert [span.source for span in spans] == ["draft", "target", "draft", "draft"]
    assert "&lt;" in spans_to_html(spans) and "<<" not in spans_to_html(spans)


def test_outcomes_are_of_evaluated_drafts():
    found = draft_outcomes(INFOS)
    # Row 0: three, the last rejected; row 1: one, rejected; row 0 again: three accepted.
    np.testing.assert_array_equal(found.position, [0, 1, 2, 0, 0, 1, 2])
    np.testing.assert_array_equal(found.is_accepted, [1, 1, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(found.target_probs, [0.9, 0.5, 0.1, 0.8, 0.9, 0.5, 0.1], rtol=1e-6)
    np.testing.assert_allclose(found.confidence, [0.2, 0.3, 0.4, 0.2, 0.2, 0.3, 0.4], rtol=1e-6)
    with pytest.raises(ValueError, match="record_drafts=True"):
        draft_outcomes([INFOS[0]._replace(draft_record=None)])
