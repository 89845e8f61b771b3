"""Rollouts equal decoding one row at a time."""

import jax
import numpy as np
import pytest

from bass_jax.training.rollout import batches_by_length, roll_out, top_distribution
from tests.training.conftest import VOCAB, next_token


def _greedy(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(model, tokens))
    return tokens[len(prompt) :]


def test_greedy_rows_equal_decoding_one_row(target):
    # Breaking it: gathering `last` without its cache when the batch is compacted.
    generator = np.random.default_rng(0)
    shared = generator.integers(0, VOCAB, 5)
    prompts = [np.concatenate([shared, generator.integers(0, VOCAB, n)]).astype(np.int32) for n in (1, 4, 9, 2, 6)]
    expected = [_greedy(target, prompt, 24) for prompt in prompts]
    stop = expected[0][10]
    rollouts = roll_out(
        target, prompts, temperatures=[0.0] * 5, key=jax.random.key(0), max_new_tokens=24, stop_ids=(stop,), top=4
    )
    for tokens, rollout in zip(expected, rollouts, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else 24
        assert rollout.response.tolist() == tokens[:end]
        assert rollout.distribution_ids.shape == (end, 4)
        np.testing.assert_array_equal(rollout.distribution_ids[:, 0], rollout.response)


def test_a_cache_that_keeps_its_size_gives_the_same_rollouts(target, monkeypatch):
    """On a GPU it neither grows nor is compacted."""
    prompts = [np.arange(1, 1 + length, dtype=np.int32) for length in (3, 70, 9, 5)]
    options = {"temperatures": [1.0, 0.0, 0.7, 0.0], "key": jax.random.key(3), "max_new_tokens": 20, "top": 4}
    options |= {"stop_ids": [1, 2, 3], "keep_hidden": True}
    resized = roll_out(target, prompts, **options)
    monkeypatch.setattr("bass_jax.training.rollout._is_resized", lambda: False)
    monkeypatch.setattr("bass_jax.training.rollout._slots_to_keep", lambda done: pytest.fail("it was compacted"))
    fixed = roll_out(target, prompts, **options)
    assert len({len(row.response) for row in resized}) > 1
    for one, other in zip(resized, fixed, strict=True):
        for field in ("prompt", "response", "distribution_ids"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        np.testing.assert_allclose(one.distribution_logprobs, other.distribution_logprobs, atol=1e-5)
        assert one.hidden is not None and other.hidden is not None
        np.testing.assert_allclose(one.hidden, other.hidden, atol=2e-3)


def test_sampled_rows_do_not_depend_on_other_rows(target):
    prompts = [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)]
    options = {"key": jax.random.key(5), "max_new_tokens": 12, "stop_ids": (), "top": 8}
    together = roll_out(target, prompts, temperatures=[1.0, 0.0], **options)
    alone = roll_out(target, prompts[:1], temperatures=[1.0], **options)
    np.testing.assert_array_equal(together[0].response, alone[0].response)
    assert not np.array_equal(together[0].response, together[0].distribution_ids[:, 0])


@pytest.mark.parametrize("vocab", [40, 128, 500])
def test_the_top_distribution_is_exact(vocab):
    logits = jax.random.normal(jax.random.key(1), (3, vocab)) * 3
    ids, logprobs = top_distribution(logits, 16)
    values, expected = jax.lax.top_k(jax.nn.log_softmax(logits), 16)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(logprobs, values, atol=1e-5)  # A few units of the log-sum-exp's rounding.


def test_batches_hold_every_row_once_and_similar_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, 50).tolist()
    groups = list(batches_by_length(lengths, batch=8, window=3))
    assert sorted(index for group in groups for index in group) == list(range(50))
    assert all(max(group) < 24 for group in groups[:3])
