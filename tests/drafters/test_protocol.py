"""Every drafter passes the conformance test. Add a new drafter to the fixture `drafters`."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.drafters import (
    DraftContext,
    ForcedTokensDrafter,
    NgramDrafter,
    SuffixDrafter,
    early_exit_drafter,
    hidden_layers_of,
    reads_hidden_states,
)
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.sampling import LogitsProcessors, SamplingParams
from bass_jax.sampling.keys import row_keys, step_draft_keys
from bass_jax.testing import check_drafter
from tests import tiny
from tests.marks import mostly_slow
from tests.tiny import VOCAB

NAMES = (
    "model",
    "padded vocabulary",
    "reduced vocabulary",
    "shared embedding",
    "other vocabulary",
    "early exit",
    "eagle",
    "eagle3",
    "p-eagle",
    "mtp",
    "dflash",
    "dflash from the anchor",
    "ngram",
    "suffix",
    "suffix with finished text",
    "forced tokens",
    "retrieval",
    "ensemble",
    "table",
    "repeat",
)
EARLY_EXIT_TARGET = tiny.model(1, num_layers=2)
LENGTHS = np.array([1, 5, 9, 8, 3], np.int32)
WANTED = np.array([4, 0, 3, 4, 1], np.int32)
G, CAPACITY = 4, 64


@pytest.fixture(scope="module")
def drafters():
    target = tiny.model(1)
    return {
        "model": tiny.model_drafter(target),
        "padded vocabulary": tiny.model_drafter(tiny.padded_vocabulary(target, VOCAB + 5)),
        "reduced vocabulary": tiny.model_drafter(tiny.reduced_vocabulary((1, 3, 4, 5, 9))),
        "shared embedding": tiny.model_drafter(tiny.shared_embedding(target)),
        "other vocabulary": tiny.other_vocabulary(),
        "early exit": early_exit_drafter(EARLY_EXIT_TARGET),
        "eagle": tiny.eagle_drafter(target),
        "eagle3": tiny.eagle3_drafter(target),
        "p-eagle": tiny.eagle3_drafter(target, mask=4),
        "mtp": tiny.mtp_drafter(target),
        "dflash": tiny.dflash_drafter(target),
        "dflash from the anchor": tiny.dflash_drafter(target, block_size=4, sample_from_anchor=True),
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
        "suffix with finished text": tiny.shared_suffix(),
        "forced tokens": ForcedTokensDrafter(),
        "retrieval": tiny.retrieval_drafter(),
        "ensemble": tiny.ensemble_drafter(tiny.model_drafter(target)),
        "table": tiny.table_drafter(),
        "repeat": RepeatDrafter(),
    }


def context(lengths=LENGTHS, wanted=WANTED) -> DraftContext:
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (len(lengths), CAPACITY)).astype(np.int32)
    tokens[3:4, :8] = [5, 6, 7, 5, 6, 7, 5, 6]  # A row that repeats itself.
    tokens = np.where(np.arange(CAPACITY) < lengths[:, None], tokens, 0)
    num_rows = len(lengths)
    keys = row_keys(jax.random.key(0), jnp.arange(num_rows, dtype=jnp.uint32))
    sampling = SamplingParams(temperature=[1.0, 0.0, 0.7, 1.0, 1.0][:num_rows], top_p=0.9)
    return DraftContext(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths),
        num_wanted=jnp.asarray(wanted),
        sampling_arrays=sampling.sampling_arrays(num_rows, VOCAB),
        keys=step_draft_keys(keys, jnp.zeros(num_rows, jnp.int32), G),
        processors=LogitsProcessors(None, jnp.asarray(lengths), jnp.full((num_rows, 1), -1)),
    )


def init(drafter, tokens, lengths):
    """Initializes `drafter`, with arbitrary hidden states if it reads them."""
    if not reads_hidden_states(drafter):
        return drafter.init(tokens, lengths)
    width = tiny.config().width * max(1, len(hidden_layers_of(drafter)))
    table = np.random.default_rng(3).normal(size=(VOCAB, width)).astype(np.float32)
    return drafter.init(tokens, lengths, jnp.asarray(table)[tokens % VOCAB])


@functools.partial(jax.jit, static_argnames="is_sampled")
def propose(drafter, context, is_sampled=True):
    state = init(drafter, context.tokens, context.lengths)
    return drafter.propose(state, context, G, is_sampled=is_sampled)


@pytest.mark.parametrize("name", mostly_slow(NAMES, lambda name: name in ("ngram", "retrieval")))
def test_a_drafter_passes_the_conformance_test(drafters, name):
    width = tiny.config().width * max(1, len(hidden_layers_of(drafters[name])))
    check_drafter(drafters[name], VOCAB, hidden_width=width, target=EARLY_EXIT_TARGET)


def test_a_reduced_vocabulary_proposes_only_its_tokens(drafters):
    proposal, _ = propose(drafters["reduced vocabulary"], context())
    others = np.setdiff1d(np.arange(VOCAB), [1, 3, 4, 5, 9])
    assert not np.asarray(proposal.probs)[..., others].any()


@pytest.mark.parametrize(
    "name, is_sampled",
    mostly_slow(
        itertools.product(["model", "reduced vocabulary"], [True, False]),
        lambda case: case == ("model", True),
    ),
)
def test_a_model_stops_before_a_draft_of_low_confidence(drafters, name, is_sampled):
    """The drafts are those without a threshold, up to the first whose confidence is below the threshold."""
    free, _ = propose(drafters[name], context()._replace(min_confidence=jnp.zeros(5)), is_sampled)
    threshold = np.float32([0.0, 0.5, np.median(free.confidence[2]), 0.999, 1.1])
    cut, state = propose(drafters[name], context()._replace(min_confidence=jnp.asarray(threshold)), is_sampled)
    is_confident = np.asarray(free.confidence) >= threshold[:, None]
    expected = np.minimum(np.cumprod(is_confident, axis=1).sum(axis=1), WANTED)
    np.testing.assert_array_equal(cut.num_drafted, expected)
    assert expected[0] == WANTED[0] > expected.min()
    for row, num in enumerate(expected):
        np.testing.assert_array_equal(cut.tokens[row, :num], free.tokens[row, :num])
    # The cache holds the committed tokens and the drafts before the last.
    np.testing.assert_array_equal(
        state.num_cached, np.where(WANTED > 0, LENGTHS + np.maximum(expected, 1), LENGTHS) - 1
    )


# The proposals of the drafters.


def lookup(tokens, wanted=G, **settings):
    row = np.zeros((1, CAPACITY), np.int32)
    row[0, : len(tokens)] = tokens
    fixed = context(np.array([len(tokens)], np.int32), np.array([wanted], np.int32))
    proposal, _ = propose(NgramDrafter(**settings), fixed._replace(tokens=jnp.asarray(row)))
    return proposal.tokens[0, : int(proposal.num_drafted[0])].tolist()


@pytest.mark.parametrize(
    "tokens, settings, expected",
    [
        ([1, 2, 3, 4, 5, 1, 2], {}, [3, 4, 5, 1]),
        ([1, 2, 7, 3, 2, 8, 1, 2], {}, [7, 3, 2, 8]),  # The longer match is used, not the more recent one.
        ([1, 7, 0, 1, 8, 0, 1], {}, [8, 0, 1, 8]),  # The most recent of equal matches, continued periodically.
        ([4, 4], {}, [4, 4, 4, 4]),
        ([1, 2, 3], {}, []),
        ([7], {}, []),
        ([1, 2, 9, 2], {"min_ngram": 2}, []),
        ([3, 1, 2, 9, 3, 1, 2], {"max_ngram": 1}, [9, 3, 1, 2]),
        ([0, 0, 5], {}, []),  # The padding of the buffer is token 0 and must not match.
        ([5, 0], {}, []),
    ],
)
def test_prompt_lookup(tokens, settings, expected):
    assert lookup(tokens, **settings) == expected
    assert lookup(tokens, wanted=2, **settings) == expected[:2]


def test_lookup_confidence_grows_with_the_match():
    """With a threshold, a row whose match is too short drafts nothing."""
    tokens = np.zeros((3, CAPACITY), np.int32)
    for row, text in enumerate(([7, 1, 2, 3, 9, 1, 2, 3], [7, 8, 3, 9, 3], [1, 2, 3])):
        tokens[row, : len(text)] = text
    current = context(np.array([8, 5, 3], np.int32), np.full(3, G, np.int32))._replace(tokens=jnp.asarray(tokens))
    proposal, _ = propose(NgramDrafter(), current)
    assert proposal.num_drafted.tolist() == [G, G, 0]
    matched = np.array([[3], [1]]) + np.arange(G)
    np.testing.assert_allclose(proposal.confidence[:2], matched / (matched + 2), rtol=1e-6)
    cut, _ = propose(NgramDrafter(), current._replace(min_confidence=jnp.full(3, 0.5)))
    assert cut.num_drafted.tolist() == [G, 0, 0]


@pytest.mark.parametrize("settings", [{"min_ngram": 0}, {"max_ngram": 1, "min_ngram": 2}])
def test_lookup_refuses_arguments_out_of_range(settings):
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(**settings)


def test_the_template_repeats_the_last_token():
    proposal, _ = propose(RepeatDrafter(), context())
    last = np.asarray(context().tokens)[np.arange(5), LENGTHS - 1]
    np.testing.assert_array_equal(proposal.tokens, np.repeat(last[:, None], G, axis=1))
    assert dataclasses.fields(RepeatDrafter) == ()
