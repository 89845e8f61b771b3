"""The shared-noise rule emits exactly the tokens of regular sampling, for all drafters, draft lengths and settings."""

import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import NgramDrafter
from bass_jax.engine.generate import GenerateLoop
from tests import tiny
from tests.marks import mostly_slow

NUM_NEW = 16
SAMPLING = bass.SamplingParams(temperature=np.tile([0.2, 0.8, 1.0, 1.3], 16), top_p=np.repeat([1.0, 0.9], 32))
PROMPTS = [[1 + i % 9, *range(i % 5)] for i in range(64)]
SEEDS = range(100, 164)


DRAFTERS = ("perfect", "often accepted", "reduced vocabulary", "ngram", "table")


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


@pytest.fixture(scope="module")
def regular(target):
    """The tokens of regular sampling of 64 rows with different seeds."""
    pair = bass.Pair(target, NgramDrafter())
    options = {"sampling": SAMPLING, "seeds": SEEDS, "max_new_tokens": NUM_NEW}
    return bass.generate(pair, PROMPTS, step="decode", **options).tokens


@pytest.mark.parametrize("drafter", mostly_slow(DRAFTERS, lambda name: name in ("perfect", "often accepted", "ngram")))
def test_tokens_equal_those_of_regular_sampling(target, regular, drafter):
    drafter = {
        "perfect": tiny.model_drafter(target),
        "often accepted": tiny.model_drafter(tiny.perturbed(target, 0.1)),
        "reduced vocabulary": tiny.model_drafter(tiny.reduced_vocabulary((1, 3, 4, 5, 9))),
        "ngram": NgramDrafter(),
        "table": tiny.table_drafter(),
    }[drafter]
    pair, random = bass.Pair(target, drafter), np.random.default_rng(0)
    run = GenerateLoop(
        pair, PROMPTS, bass.SpecConfig(4, "shared_noise"), sampling=SAMPLING, seeds=SEEDS, max_new_tokens=NUM_NEW
    )
    for _ in run:  # Every row gets another draft length in every step.
        run.state = run.state._replace(draft_lens=jnp.asarray(random.integers(0, 5, 64), jnp.int32))
    for tokens, expected in zip(run.result().tokens, regular, strict=True):
        np.testing.assert_array_equal(tokens, expected)


def test_all_drafts_of_a_perfect_drafter_are_accepted(target):
    pair, spec = bass.Pair(target, tiny.model_drafter(target)), bass.SpecConfig(4, "shared_noise")
    run = bass.generate(pair, PROMPTS, spec, sampling=SAMPLING, seeds=SEEDS, max_new_tokens=NUM_NEW)
    assert run.metrics.acceptance_rate == 1.0


def test_steps_with_and_without_drafts_can_alternate(target, regular):
    """A policy that stops drafting for a while does not change the tokens."""
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))
    run = GenerateLoop(
        pair, PROMPTS, bass.SpecConfig(4, "shared_noise"), sampling=SAMPLING, seeds=SEEDS, max_new_tokens=NUM_NEW
    )
    for index, _ in enumerate(run):
        run.state = run.state._replace(draft_lens=jnp.full(64, 4 * (index % 2), jnp.int32))
    for tokens, expected in zip(run.result().tokens, regular, strict=True):
        np.testing.assert_array_equal(tokens, expected)
