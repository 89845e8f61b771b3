"""A row's tokens depend only on its own seed, prompt and sampling parameters.

Otherwise a result could not be reproduced, because it would depend on the other rows of the batch.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bass_jax as bass
from tests import tiny
from tests.marks import mostly_slow

NUM_NEW = 14
SPEC = bass.SpecConfig(4)
MULTI_DRAFT = bass.SpecConfig(3, "multi_draft", num_candidates=2)
CASES = {
    "model": ("model", "speculate", SPEC),
    "table": ("table", "speculate", SPEC),
    "regular": ("table", "decode", SPEC),
    "multi-draft model": ("model", "speculate", MULTI_DRAFT),
    "multi-draft table": ("table", "speculate", MULTI_DRAFT),
}
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "min_new_tokens": 9,
        "logit_bias": {2: 1.0, 7: -1.0},
    },
)
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
    """Returns the tokens of one batch of requests, each with its seed and sampling parameters."""
    rows = [setting for _, _, setting in requests]
    sampling = bass.SamplingParams(**{name: [row[name] for row in rows] for name in OFF})
    seeds, prompts = [seed for seed, _, _ in requests], [prompt for _, prompt, _ in requests]
    options = {"max_new_tokens": NUM_NEW} | options
    return bass.generate(pair, prompts, spec, sampling=sampling, seeds=seeds, step=step, **options).tokens


@pytest.fixture(scope="module")
def alone(pairs):
    """Case → the tokens of every request in a batch of its own, computed when a case is first used."""
    found = {}

    def compute(case):
        if case not in found:
            drafter, *options = CASES[case]
            found[case] = [serve(pairs[drafter], [request], *options)[0] for request in REQUESTS]
        return found[case]

    return compute


@pytest.mark.parametrize("case", mostly_slow(CASES, lambda case: case == "table"))
@settings(max_examples=6, deadline=None, derandomize=True)
@given(order=st.permutations(range(len(REQUESTS))).flatmap(lambda rows: st.sampled_from([rows, [*rows, rows[0]]])))
def test_a_row_does_not_depend_on_its_batch_its_slot_and_padding_rows(pairs, alone, order, case):
    """A batch of 5 requests has 3 padding rows. A batch of 6 contains one request twice."""
    drafter, *options = CASES[case]
    found = serve(pairs[drafter], [REQUESTS[i] for i in order], *options)
    for tokens, i in zip(found, order, strict=True):
        np.testing.assert_array_equal(tokens, alone(case)[i])


@pytest.mark.parametrize("case", mostly_slow(["table", "model"], lambda case: case == "table"))
def test_a_row_does_not_depend_on_the_capacity(pairs, alone, case):
    """Another row with a higher limit doubles the cache of every row. Only a row's own limit shortens its drafts."""
    found = serve(pairs[case], REQUESTS[:4], max_new_tokens=[NUM_NEW, NUM_NEW, NUM_NEW, 100])
    for row in range(3):
        np.testing.assert_array_equal(found[row], alone(case)[row])
    kept = NUM_NEW - SPEC.draft_len
    np.testing.assert_array_equal(found[3][:kept], alone(case)[3][:kept])


@pytest.mark.parametrize(
    "drafter, step",
    mostly_slow(
        [("table", "speculate"), ("table", "decode"), ("model", "speculate")],
        lambda case: case == ("table", "speculate"),
    ),
)
def test_samples_of_a_prompt_equal_repeated_prompts(pairs, drafter, step):
    """With `num_samples` a prompt is read once. Its rows differ from each other."""
    options = {"sampling": bass.SamplingParams(temperature=1.0), "max_new_tokens": NUM_NEW, "step": step}
    found = bass.generate(pairs[drafter], tiny.PROMPTS, SPEC, num_samples=3, **options).tokens
    repeated = [prompt for prompt in tiny.PROMPTS for _ in range(3)]
    expected = bass.generate(pairs[drafter], repeated, SPEC, **options).tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    for first in range(0, 9, 3):
        assert len({tuple(row.tolist()) for row in found[first : first + 3]}) == 3


def test_equal_seeds_give_equal_tokens(pairs):
    prompt, sampling = tiny.PROMPTS[1], bass.SamplingParams(temperature=1.0)
    rows = bass.generate(
        pairs["model"], [prompt] * 4, SPEC, sampling=sampling, seeds=[5, 6, 5, 2**32 - 1], max_new_tokens=NUM_NEW
    ).tokens
    np.testing.assert_array_equal(rows[0], rows[2])
    assert len({tuple(row.tolist()) for row in rows}) == 3


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3, 4, 5], [-1, 2, 3], [1, 2, 2**32]])
def test_invalid_seeds_are_refused(pairs, seeds):
    with pytest.raises(ValueError, match=r"^seeds"):
        bass.prefill(pairs["table"], tiny.PROMPTS, SPEC, seeds=seeds)
