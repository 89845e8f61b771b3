"""A row's output depends on its own seed, prompt and settings alone.

What breaking it means: a result that cannot be reproduced, because it depends on who else was served.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bass_jax as bass
from tests import tiny

NUM_NEW = 14
SPEC = bass.SpecConfig(3)
CANDIDATES = bass.SpecConfig(3, "multi_draft", num_candidates=2)
CASES = (
    ("model", "speculate", SPEC),
    ("table", "speculate", SPEC),
    ("table", "decode", SPEC),
    ("model", "speculate", CANDIDATES),
)
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "min_new_tokens": 9,
     "logit_bias": {2: 1.0, 7: -1.0}},
)  # fmt: skip
OFF = {field.name: field.default for field in dataclasses.fields(bass.SamplingParams)}
REQUESTS = [
    (seed, prompt, OFF | setting)
    for seed, (prompt, setting) in enumerate(zip([*tiny.PROMPTS, [2, 4, 6, 8, 10], [9, 9]], SETTINGS, strict=True))
]


@pytest.fixture(scope="module")
def pairs():
    target = tiny.model(1)
    return {
        "model": bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2))),
        "table": bass.Pair(target, tiny.table_drafter()),
    }


def serve(pair, requests, step="speculate", spec=SPEC, **options):
    """One batch of requests, each with its seed and settings."""
    rows = [setting for _, _, setting in requests]
    sampling = bass.SamplingParams(**{name: [row[name] for row in rows] for name in OFF})
    seeds, prompts = [seed for seed, _, _ in requests], [prompt for _, prompt, _ in requests]
    options = {"max_new_tokens": NUM_NEW} | options
    return bass.generate(pair, prompts, spec, sampling=sampling, seeds=seeds, step=step, **options).tokens


@pytest.fixture(scope="module")
def alone(pairs):
    """Every request served by itself."""
    return {case: [serve(pairs[case[0]], [r], *case[1:])[0] for r in REQUESTS] for case in CASES}


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    order=st.permutations(range(len(REQUESTS))).flatmap(
        lambda rows: st.sampled_from([rows[:3], rows, [*rows, rows[0]]])
    ),
    case=st.sampled_from(CASES),
)
def test_batch_slot_padding_and_neighbours_do_not_matter(pairs, alone, order, case):
    """Batches of 3 and 5 with fillers and of 6, where one request comes twice."""
    found = serve(pairs[case[0]], [REQUESTS[i] for i in order], *case[1:])
    for tokens, i in zip(found, order, strict=True):
        np.testing.assert_array_equal(tokens, alone[case][i])


def test_capacity_does_not_matter(pairs, alone):
    """A neighbor that may grow long doubles every row's cache."""
    found = serve(pairs["model"], REQUESTS[:3], max_new_tokens=[NUM_NEW, NUM_NEW, 100])
    for row in range(2):
        np.testing.assert_array_equal(found[row], alone[CASES[0]][row])
    np.testing.assert_array_equal(found[2][:NUM_NEW], alone[CASES[0]][2])


@pytest.mark.parametrize("step", ["speculate", "decode"])
def test_samples_of_a_prompt_are_repeated_prompts(pairs, step):
    """`num_samples` reads a prompt once; its rows differ from each other and equal those of repeated prompts."""
    options = {"sampling": bass.SamplingParams(temperature=1.0), "max_new_tokens": NUM_NEW, "step": step}
    found = bass.generate(pairs["model"], tiny.PROMPTS, SPEC, num_samples=3, **options).tokens
    repeated = [prompt for prompt in tiny.PROMPTS for _ in range(3)]
    expected = bass.generate(pairs["model"], repeated, SPEC, **options).tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    for first in range(0, 9, 3):
        assert len({tuple(row.tolist()) for row in found[first : first + 3]}) == 3


def test_a_seed_is_honoured(pairs):
    """The same seed again gives the same text, another seed another text, in one batch."""
    prompt, sampling = tiny.PROMPTS[1], bass.SamplingParams(temperature=1.0)
    rows = bass.generate(
        pairs["model"], [prompt] * 4, SPEC, sampling=sampling, seeds=[5, 6, 5, 2**32 - 1], max_new_tokens=NUM_NEW
    ).tokens
    np.testing.assert_array_equal(rows[0], rows[2])
    assert len({tuple(row.tolist()) for row in rows}) == 3


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3, 4, 5], [-1, 2, 3], [1, 2, 2**32]])
def test_seeds_that_cannot_be_are_refused(pairs, seeds):
    with pytest.raises(ValueError, match=r"^seeds"):
        bass.prefill(pairs["table"], tiny.PROMPTS, SPEC, seeds=seeds)
