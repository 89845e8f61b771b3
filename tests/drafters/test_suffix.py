"""Suffix decoding against a search in plain Python."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.drafters.suffix import MATCHES, SuffixDrafter, suffix_drafter
from tests.drafters.test_protocol import CAPACITY, G, context


def search(text, drafter, num_wanted, others=()):
    """Returns the drafts and shares of one text by counting continuations, also in `others`.

    Of equally frequent tokens it takes the one after the longest match, and of equally long ones the last one.
    """
    best = (0.0, [], [])
    texts = [*others, text]

    def matched(one, end):
        return next(
            (n for n in range(max(MATCHES)) if n >= min(end, len(text)) or one[end - 1 - n] != text[-1 - n]), 32
        )

    def order(place):
        one, end = place
        num = matched(texts[one], end)
        return (min(num, 8), one, end)

    places = [(one, end) for one in range(len(texts)) for end in range(1, len(texts[one]))]
    places.sort(key=order, reverse=True)
    for num in MATCHES:
        ends = [(texts[one], end) for one, end in places if matched(texts[one], end) >= num]
        drafts, shares, probability, expected = [], [], 1.0, 0.0
        while len(drafts) < min(num_wanted, drafter.max_factor * num):
            ends = [(one, end) for one, end in ends if end + len(drafts) < len(one)]
            counts = collections.Counter(one[end + len(drafts)] for one, end in ends)
            if not counts:
                break
            token, most = counts.most_common(1)[0]  # of equal counts, the first that was seen
            probability *= most / len(ends)
            if probability < drafter.min_probability:
                break
            ends = [(one, end) for one, end in ends if one[end + len(drafts)] == token]
            drafts.append(token)
            shares.append(most / sum(counts.values()))
            expected += probability
        if expected >= best[0] and drafts:
            best = (expected, drafts, shares)
    return best[1], best[2]


@pytest.mark.parametrize("drafter", [SuffixDrafter(), SuffixDrafter(1, 0.4)], ids=str)
def test_the_drafts_are_those_of_a_search_in_python(drafter):
    random = np.random.default_rng(0)
    lengths = np.asarray([1, 2, 12, CAPACITY - G, CAPACITY - G], np.int32)
    rows = context(lengths, np.full(5, G, np.int32))
    tokens = random.integers(0, 3, (5, CAPACITY)).astype(np.int32)
    tokens[4] = np.resize([1, 2, 3, 4, 5, 6, 7], CAPACITY)  # Long suffixes occur again.
    rows = rows._replace(tokens=jnp.asarray(tokens))
    propose = jax.jit(lambda rows: drafter.propose(None, rows, G, is_sampled=True)[0])
    found = propose(rows)
    some = 0
    for row, length in enumerate(lengths):
        drafts, shares = search(tokens[row, :length].tolist(), drafter, G)
        num = int(found.num_drafted[row])
        assert found.tokens[row, :num].tolist() == drafts
        np.testing.assert_allclose(found.confidence[row, :num], shares, atol=1e-6)
        some += num
    assert found.num_drafted[0] == 0 and some > 4
    # A threshold ends a row before the first draft that is less often right.
    cut = propose(rows._replace(min_confidence=jnp.full(5, 0.9)))
    for row in range(5):
        is_below = np.asarray(found.confidence[row, : int(found.num_drafted[row])]) < 0.9
        assert cut.num_drafted[row] == (is_below.argmax() if is_below.any() else found.num_drafted[row])


def test_finished_texts_are_searched_too_and_the_oldest_are_dropped():
    random = np.random.default_rng(0)
    drafter = suffix_drafter(shared_tokens=50)
    remember = jax.jit(lambda drafter, tokens, length: drafter.with_finished_text(drafter.remember(tokens, length)))
    propose = jax.jit(lambda drafter, rows: drafter.propose(None, rows, G, is_sampled=True)[0])
    rows = context(np.asarray([1, 12, 40], np.int32), np.full(3, G, np.int32))
    kept, others = [], 0
    for length in (7, 1, 20, 16, 64, 30, 3, 49, 50):
        text = random.integers(0, 3, CAPACITY).astype(np.int32)
        drafter = remember(drafter, text, np.int32(length))
        kept = [*kept, *text[:length].tolist(), -1][-50:]
        ring, end = np.asarray(drafter.finished_text.tokens), int(drafter.finished_text.end)
        assert np.roll(ring, -end)[-len(kept) :].tolist() == kept
        # The texts in the order of the buffer, in which the last one may be before the oldest one.
        slots = " ".join(map(str, ring.tolist())).split("-1")
        texts = [[int(token) for token in one.split()] for one in slots if one.split()]
        tokens = random.integers(0, 3, (3, CAPACITY)).astype(np.int32)
        found = propose(drafter, rows._replace(tokens=jnp.asarray(tokens)))
        for row, num in enumerate((1, 12, 40)):
            drafts, shares = search(tokens[row, :num].tolist(), drafter, G, texts)
            num_drafted = int(found.num_drafted[row])
            assert found.tokens[row, :num_drafted].tolist() == drafts
            np.testing.assert_allclose(found.confidence[row, :num_drafted], shares, atol=1e-6)
            others += num_drafted * (num == 1)
    assert others > 0, "a row of one token can only have drafts of other texts"


@pytest.mark.parametrize(
    "arguments, message", [((0,), "max_factor=0"), ((1, 1.5), "min_probability=1.5: expected 0 to 1")]
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(*arguments)


def test_a_buffer_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="shared_tokens=2000000: expected"):
        suffix_drafter(shared_tokens=2_000_000)
