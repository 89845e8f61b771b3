"""The retrieval datastore: how it is built and looked up, and its file."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from bass_jax.checkpoint import read_datastore, write_datastore
from bass_jax.decoding.load_pair import load_datastore
from bass_jax.drafters import RetrievalDrafter
from bass_jax.training.build_datastore import build_datastore, look_up
from bass_jax.training.rollout import Rollout
from tests import tiny
from tests.drafters.test_protocol import context

VOCAB = 7
SIZES = {"max_ngram": 3, "min_ngram": 1}


def answers(count=40, seed=0) -> list[Rollout]:
    """Returns texts whose next token depends on the last two, with random tokens in between."""
    random = np.random.default_rng(seed)
    rollouts = []
    for _ in range(count):
        text = random.integers(0, VOCAB, 3).tolist()
        while len(text) < 30:
            probable = (2 * text[-1] + text[-2]) % VOCAB
            text.append(int(probable if random.random() < 0.7 else random.integers(VOCAB)))
        sequence = np.array(text, np.int32)
        distributions = sequence[5:, None]
        rollouts.append(
            Rollout(sequence[:5], sequence[5:], distributions, np.zeros(distributions.shape, np.float32), 0.0)
        )
    return rollouts


def dictionary(rollouts) -> dict[tuple[int, ...], int]:
    """Returns every context's most frequent next token, the lowest one of equally frequent tokens."""
    counts = collections.defaultdict(collections.Counter)
    for row in rollouts:
        text = [*row.prompt.tolist(), *row.response.tolist()]
        for place in range(len(row.prompt), len(text)):
            for length in range(1, 4):
                counts[tuple(text[place - length : place])][text[place]] += 1
    return {key: min(found, key=lambda token: (-found[token], token)) for key, found in counts.items()}


def backed_off(table, text) -> int:
    """Returns the token after the longest known context, or -1."""
    return next((table[tuple(text[-length:])] for length in (3, 2, 1) if tuple(text[-length:]) in table), -1)


def test_predictions_equal_those_of_a_dictionary_of_all_contexts():
    """Leaving out contexts with the same prediction as a shorter one does not change the drafts."""
    arrays, table = build_datastore(answers(), **SIZES), dictionary(answers())
    assert len(arrays.keys) < 0.8 * len(table)
    assert (np.diff(arrays.keys.astype(np.int64)) > 0).all()
    for row in answers(10, seed=1):
        sequence = np.concatenate([row.prompt, row.response])
        found, _ = look_up(arrays, sequence, 1, **SIZES)
        assert found.tolist() == [backed_off(table, sequence[:place].tolist()) for place in range(1, len(sequence))]


def test_confidence_is_calibrated():
    """On new texts of the same source, the mean confidence equals the share of right predictions."""
    arrays = build_datastore(answers(400), **SIZES)
    found, confidences, truth = [], [], []
    for row in answers(200, seed=1):
        sequence = np.concatenate([row.prompt, row.response])
        tokens, confidence = look_up(arrays, sequence, 5, **SIZES)
        found, confidences, truth = [*found, *tokens], [*confidences, *confidence], [*truth, *row.response]
    is_right = np.array(found) == np.array(truth)
    assert np.mean(confidences) == pytest.approx(is_right.mean(), abs=0.03)


def test_each_draft_is_looked_up_after_the_drafts_before_it():
    arrays = build_datastore(answers(), **SIZES)
    drafter = RetrievalDrafter(*map(jnp.asarray, arrays), **SIZES)
    current = context(wanted=np.array([4, 0, 3, 4, 1], np.int32))
    current = current._replace(tokens=current.tokens % VOCAB)
    proposal, _ = jax.jit(drafter.propose, static_argnums=2, static_argnames="is_sampled")(
        None, current, 4, is_sampled=False
    )
    confidences = []
    for row, num in enumerate(np.asarray(current.num_wanted)):
        text = np.asarray(current.tokens[row, : int(current.lengths[row])]).tolist()
        expected = []
        while len(expected) < num:
            (token,), (confidence,) = look_up(
                arrays, np.array([*text, *expected, 0], np.int32), len(text + expected), **SIZES
            )
            if token < 0:
                break
            expected.append(int(token))
            confidences.append(confidence)
        assert proposal.tokens[row, : int(proposal.num_drafted[row])].tolist() == expected
    # A threshold ends a row before the first draft below it.
    threshold = float(np.median(confidences))
    strict = dataclasses.replace(drafter, min_confidence=threshold)
    cut, _ = strict.propose(None, current, 4, is_sampled=False)
    is_confident = (np.asarray(proposal.confidence) >= np.float32(threshold)) & (
        np.arange(4) < proposal.num_drafted[:, None]
    )
    np.testing.assert_array_equal(cut.num_drafted, np.cumprod(is_confident, axis=1).sum(axis=1))
    assert 0 < cut.num_drafted.sum() < proposal.num_drafted.sum()


def test_the_rarest_contexts_are_dropped_first():
    small = build_datastore(answers(), **SIZES, max_entries=30)
    assert len(small.keys) == 30
    assert np.isin(small.keys, build_datastore(answers(), **SIZES).keys).all()


@pytest.mark.parametrize(
    "rollouts, options, message",
    [
        ([], SIZES, "rollouts: there is nothing to count"),
        (answers(1), {"max_ngram": 1, "min_ngram": 2}, "min_ngram=2: expected 1 to max_ngram=1"),
        (answers(1), SIZES | {"max_entries": 0}, "max_entries=0"),
    ],
)
def test_invalid_input_is_refused(rollouts, options, message):
    with pytest.raises(ValueError, match=message):
        build_datastore(rollouts, **options)


def test_a_file_is_read_as_it_was_written(tmp_path):
    arrays, path = build_datastore(answers(), **SIZES), tmp_path / "store.safetensors"
    write_datastore(path, arrays._asdict(), **SIZES, vocab_size=VOCAB, about={"num_tokens": 3})
    found, about = read_datastore(path)
    for name, array in arrays._asdict().items():
        np.testing.assert_array_equal(found[name], array)
    assert about["about"] == {"num_tokens": 3}
    drafter = load_datastore(path, tiny.model(1))
    assert (drafter.max_ngram, drafter.min_ngram) == (3, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["store.safetensors"]


def test_an_invalid_file_is_refused(tmp_path):
    path, arrays = tmp_path / "store.safetensors", build_datastore(answers(), **SIZES)._asdict()
    with pytest.raises(ValueError, match="not readable as a retrieval datastore"):
        read_datastore(path)
    save_file(dict(arrays), path)
    with pytest.raises(ValueError, match="not a retrieval datastore; bass-jax build-datastore writes one"):
        read_datastore(path)
    write_datastore(path, arrays | {"tokens": arrays["tokens"][:-1]}, **SIZES, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="of one length and not empty"):
        read_datastore(path)
    write_datastore(path, arrays, **SIZES, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="a datastore of 7 tokens, the target has 5"):
        read_datastore(path, vocab_size=5)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not readable as a retrieval datastore"):
        read_datastore(path)
