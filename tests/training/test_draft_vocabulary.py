"""The output vocabulary of a draft and the columns of its head."""

import numpy as np
import pytest

from bass_jax.training.batches import make_batch
from bass_jax.training.draft_vocabulary import choose_output_ids, output_columns, proposed_ids
from bass_jax.training.rollout import Rollout
from tests.training.conftest import VOCAB


def test_the_most_frequent_tokens_and_the_required_ones():
    responses = [np.array([5, 5, 5, 9, 9, 7])]
    prompts = [np.array([11, 11, 11, 11, 7])]
    ids = choose_output_ids(responses, prompts, vocab_size=20, size=5, always=(0, 19))
    assert ids.tolist() == [0, 5, 9, 11, 19]
    columns = output_columns(ids, 20)
    np.testing.assert_array_equal(columns[ids], np.arange(5))
    assert (columns >= 0).sum() == 5


@pytest.mark.parametrize("size", [1, 21])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(ValueError, match=f"output_vocab_size={size}"):
        choose_output_ids([np.array([1])], [], vocab_size=20, size=size, always=(0, 19))


def test_the_distribution_is_renormalized_over_the_output_vocabulary():
    ids = np.array([[3, 50, 4], [50, 51, 52]], np.int32)
    logprobs = np.log([[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]]).astype(np.float32)
    row = Rollout(np.array([1, 2], np.int32), np.array([3, 50], np.int32), ids, logprobs, 0.0)
    batch = make_batch([row], output_columns(np.arange(2, 50), VOCAB), 8, 4, 1)
    np.testing.assert_array_equal(batch.distribution_columns[0], [1, -1, 2])
    np.testing.assert_allclose(batch.distribution_probs[0], [5 / 6, 0, 1 / 6], rtol=1e-6)
    np.testing.assert_array_equal(batch.distribution_probs[1], 0)
    assert batch.labels[:2].tolist() == [1, -1]
    assert batch.weights.tolist() == [1, 1, 0, 0]
    assert batch.selected[:2].tolist() == [1, 2]


def test_a_draft_starts_from_the_targets_embedding(make_config, make_draft, target):
    ids = np.arange(3, 51, dtype=np.int32)
    draft = make_draft(make_config(), ids)
    np.testing.assert_array_equal(proposed_ids(draft), ids)
    np.testing.assert_array_equal(draft.params["embedding"], target.params["embedding"])
    # The draft's width of 32 holds all 16 directions, so the projection is lossless.
    projected = np.asarray(draft.params["embedding"])[ids] @ np.asarray(draft.params["embedding_projection"]).T
    assert np.sqrt((projected**2).mean()) == pytest.approx(1, rel=1e-3)
    assert np.linalg.matrix_rank(projected) == 16
