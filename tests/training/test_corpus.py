"""The corpus on disk, its split, and what is refused."""

import numpy as np
import pytest

from bass_jax.checkpoint import Tokenizer
from bass_jax.training.corpus import Corpus
from bass_jax.training.data import CorpusRows, corpus_rows
from bass_jax.training.prompts import prompt_source
from tests.training.conftest import synthetic_rollouts


class _Words(Tokenizer):
    """Decodes every token to its number."""

    def __init__(self):
        """Reads no file."""

    def decode(self, ids, skip_special=True):
        return " ".join(map(str, ids))


def open_rows(config):
    return corpus_rows(config, prompt_source(config), _Words())


def test_shards_are_read_as_written(tmp_path):
    corpus = Corpus(tmp_path / "corpus", {"seed": 1})
    rollouts = synthetic_rollouts(5)
    assert corpus.write(3, rollouts, ["a", "b", "a", "b", "a"]) == sum(len(row.response) for row in rollouts)
    assert Corpus(tmp_path / "corpus").shards() == [3]
    found = list(Corpus(tmp_path / "corpus").read())
    assert [source for _, source in found] == ["a", "b", "a", "b", "a"]
    for (row, _), expected in zip(found, rollouts, strict=True):
        for name in ("prompt", "response", "distribution_ids"):
            np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))
        # float16 on disk.
        np.testing.assert_allclose(row.distribution_logprobs, expected.distribution_logprobs, rtol=2**-10)
        assert row.hidden is None


def test_hidden_states_are_read_as_written(tmp_path):
    random = np.random.default_rng(0)
    rollouts = [
        row._replace(hidden=random.normal(size=(len(row.inputs), 4)).astype(np.float16))
        for row in synthetic_rollouts(3)
    ]
    corpus = Corpus(tmp_path / "corpus", {})
    corpus.write(0, rollouts, ["a"] * 3)
    for (row, _), expected in zip(corpus.read(), rollouts, strict=True):
        np.testing.assert_array_equal(row.hidden, expected.hidden)
    np.save(tmp_path / "corpus" / "hidden_00000.npy", np.zeros((1, 4), np.float16))
    with pytest.raises(ValueError, match=r"hidden_00000.npy has hidden states of 1 tokens, its shard \d+"):
        corpus.read_shard(0)


def test_a_corpus_of_another_description_is_refused(tmp_path):
    Corpus(tmp_path / "corpus", {"seed": 1})
    with pytest.raises(ValueError, match="seed differs"):
        Corpus(tmp_path / "corpus", {"seed": 2})
    with pytest.raises(ValueError, match="no corpus here"):
        Corpus(tmp_path / "elsewhere")


def test_a_truncated_shard_is_named(tmp_path):
    corpus = Corpus(tmp_path / "corpus", {})
    corpus.write(0, synthetic_rollouts(5), ["a"] * 5)
    path = tmp_path / "corpus" / "shard_00000.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"shard_00000\.npz: not a readable shard"):
        corpus.read_shard(0)


def test_all_answers_to_a_prompt_are_on_one_side(make_rows):
    rollouts = synthetic_rollouts(200)
    rows = make_rows(rollouts + rollouts, share=0.3)
    trained = {row.prompt.tobytes() for row in rows.trained(rows.shards())}
    held_out = {row.prompt.tobytes() for row in rows.held_out(rows.shards())}
    assert trained and held_out and not trained & held_out
    assert 0.15 < len(held_out) / len(trained | held_out) < 0.45


def test_a_corpus_that_overlaps_held_out_prompts_is_refused(make_rows):
    rollouts = synthetic_rollouts(100)
    secret = {rollouts[7].prompt.tobytes()}
    few = make_rows(rollouts, find_overlap=lambda row: "a run" if row.prompt.tobytes() in secret else None)
    assert not secret & {row.prompt.tobytes() for row in few.rows(few.shards())}
    many = CorpusRows(few._corpora, 0.0, 128, lambda row: "to be or not")
    with pytest.raises(ValueError, match="50 of 50 rows, first on 'to be or not'"):
        many.trained([0])


def test_several_corpora_are_read_as_one(tmp_path, make_config):
    """Shards with the same number are not confused, and each corpus may grow."""
    rollouts = synthetic_rollouts(30)
    own, extra = (Corpus(tmp_path / name / "corpus", {"target": "tiny"}) for name in ("run", "other"))
    own.write(0, rollouts[:10], ["a"] * 10)
    extra.write(0, rollouts[10:20], ["a"] * 10)
    rows = open_rows(make_config(extra_corpora=[str(tmp_path / "other")], training={"held_out_share": 0.0}))
    before = rows.shards()
    own.write(1, rollouts[20:], ["a"] * 10)
    found = [row.prompt.tobytes() for row in rows.trained(before)]
    assert found == [row.prompt.tobytes() for row in rollouts[:20]]
    assert len(rows.trained(rows.shards())) == 30 and set(before) < set(rows.shards())


def test_an_extra_corpus_that_does_not_fit_is_named(tmp_path, make_config):
    Corpus(tmp_path / "run" / "corpus", {"target": "tiny"})
    config = make_config(extra_corpora=[str(tmp_path / "other")])
    with pytest.raises(ValueError, match="other/corpus: no corpus here"):
        open_rows(config)
    Corpus(tmp_path / "other" / "corpus", {"target": "large"})
    with pytest.raises(ValueError, match=r"extra_corpora: .*other is of target 'large', expected 'tiny'"):
        open_rows(config)
