"""The shared-noise rule gives regular sampling's very tokens, for any drafter, draft length, batch and setting."""

import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import NgramDrafter
from bass_jax.engine.generate import GenerateLoop
from tests import tiny

NUM_NEW = 16
SAMPLING = bass.SamplingParams(temperature=np.tile([0.2, 0.8, 1.0, 1.3], 16), top_p=np.repeat([1.0, 0.9], 32))
PROMPTS = [[1 + i % 9, *range(i % 5)] for i in range(64)]
SEEDS = range(100, 164)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def regular(target):
    """Regular sampling of 64 rows with seeds of their own."""
    pair = bass.Pair(target, NgramDrafter())
    options = {"sampling": SAMPLING, "seeds": SEEDS, "max_new_tokens": NUM_NEW}
    return bass.generate(pair, PROMPTS, step="decode", **options).tokens


@pytest.mark.parametrize("drafter", ["perfect", "often right", "trimmed", "ngram", "table"])
def test_tokens_are_those_of_regular_sampling(target, regular, drafter):
    drafter = {
        "perfect": tiny.model_drafter(target),
        "often right": tiny.model_drafter(tiny.perturbed(target, 0.1)),
        "trimmed": tiny.model_drafter(tiny.reduced_vocabulary((1, 3, 4, 5, 9))),
        "ngram": NgramDrafter(),
        "table": tiny.table_drafter(),
    }[drafter]
    pair, random = bass.Pair(target, drafter), np.random.default_rng(0)
    run = GenerateLoop(
        pair, PROMPTS, bass.SpecConfig(4, "shared_noise"), sampling=SAMPLING, seeds=SEEDS, max_new_tokens=NUM_NEW
    )
    for _ in run:  # every row asks for another number of drafts at every step
        run.state = run.state._replace(draft_lens=jnp.asarray(random.integers(0, 5, 64), jnp.int32))
    for tokens, expected in zip(run.result().tokens, regular, strict=True):
        np.testing.assert_array_equal(tokens, expected)


def test_a_perfect_drafter_that_shares_the_noise_is_always_right(target):
    run = bass.generate(
        bass.Pair(target, tiny.model_drafter(target)), PROMPTS, bass.SpecConfig(4, "shared_noise"),
        sampling=SAMPLING, seeds=SEEDS, max_new_tokens=NUM_NEW,
    )  # fmt: skip
    assert run.summary.acceptance_rate == 1.0


def test_regular_and_speculative_steps_may_take_turns(target, regular):
    """A policy that stops drafting for a while changes no token."""
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))
    run = GenerateLoop(
        pair, PROMPTS, bass.SpecConfig(4, "shared_noise"), sampling=SAMPLING, seeds=SEEDS, max_new_tokens=NUM_NEW
    )
    for index, _ in enumerate(run):
        run.state = run.state._replace(draft_lens=jnp.full(64, 4 * (index % 2), jnp.int32))
    for tokens, expected in zip(run.result().tokens, regular, strict=True):
        np.testing.assert_array_equal(tokens, expected)
