"""Suffix decoding against a search in plain Python."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.drafters.suffix import MATCHES, SuffixDrafter
from tests.drafters.test_protocol import CAPACITY, G, context


def search(text, drafter, num_wanted):
    """Returns the drafts and shares of one text by counting continuations."""
    best = (0.0, [], [])
    for num in MATCHES:
        ends = (
            [end for end in range(num, len(text)) if text[end - num : end] == text[-num:]] if num <= len(text) else []
        )
        drafts, shares, probability, expected = [], [], 1.0, 0.0
        while len(drafts) < min(num_wanted, drafter.max_factor * num):
            ends = [end for end in ends if end + len(drafts) < len(text)]
            counts = collections.Counter(text[end + len(drafts)] for end in ends)
            if not counts:
                break
            most = max(counts.values())
            token = min(token for token, count in counts.items() if count == most)
            probability *= most / len(ends)
            if probability < drafter.min_probability:
                break
            ends = [end for end in ends if text[end + len(drafts)] == token]
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


@pytest.mark.parametrize(
    "arguments, message", [((0,), "max_factor=0"), ((1, 1.5), "min_probability=1.5: expected 0 to 1")]
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(*arguments)
