"""Log-probabilities equal those of one pass over the finished text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import NgramDrafter
from bass_jax.testing.enumeration import reference_distribution
from tests import tiny
from tests.marks import mostly_slow

SETTING = {"temperature": 0.8, "top_k": 6, "top_p": 0.9}
NUM = 3


@pytest.fixture(scope="module")
def target():
    return tiny.model(1)


def raw_logits(target, prompt, output):
    """Returns the logits of every emitted token's position, ``[num, V]``, from one pass without the loop."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(prompt) + len(output)] = [*prompt, *output]
    positions = jnp.arange(64, dtype=jnp.int32)[None]
    logits, *_ = jax.jit(bass.models.Model.forward)(target, tokens, positions, target.init_cache(1, 64))
    return np.asarray(logits[0], np.float64)[len(prompt) - 1 : len(prompt) + len(output) - 1]


@pytest.mark.parametrize(
    "rule, num_candidates, step",
    mostly_slow(
        [("token", 1, "speculate"), ("block", 1, "speculate"), ("multi_draft", 3, "speculate"), ("token", 1, "decode")],
        lambda case: case[0] == "token",
    ),
)
def test_log_probabilities_of_both_distributions_equal_those_of_one_pass(target, rule, num_candidates, step):
    drafter = tiny.model_drafter(tiny.perturbed(target, 0.1)) if rule == "token" else NgramDrafter()
    spec = bass.SpecConfig(3, rule, num_candidates=num_candidates, num_logprobs=NUM)
    sampling = bass.SamplingParams(**SETTING, logit_bias={3: 0.5})
    run = bass.generate(
        bass.Pair(target, drafter), tiny.PROMPTS, spec, sampling=sampling, max_new_tokens=[20, 7, 30], step=step
    )
    for row, prompt in enumerate(tiny.PROMPTS):
        tokens, token_logprobs = run.tokens[row], run.token_logprobs[row]
        logits = raw_logits(target, prompt, tokens)
        raw = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        logits[:, 3] += 0.5
        with np.errstate(divide="ignore"):
            warped = np.log(reference_distribution(logits, **SETTING))
        chosen = np.arange(len(tokens)), tokens
        np.testing.assert_allclose(run.logprobs[row], raw[chosen], atol=1e-3)
        np.testing.assert_allclose(token_logprobs.warped_logprobs, warped[chosen], atol=1e-3)
        for ids, values, distribution in [
            (token_logprobs.raw_top_tokens, token_logprobs.raw_top_logprobs, raw),
            (token_logprobs.warped_top_tokens, token_logprobs.warped_top_logprobs, warped),
        ]:
            assert ids.shape == values.shape == (len(tokens), NUM)
            np.testing.assert_allclose(values, -np.sort(-distribution, axis=-1)[:, :NUM], atol=1e-3)
            is_possible = values > -np.inf
            np.testing.assert_allclose(
                np.take_along_axis(distribution, ids, axis=1)[is_possible], values[is_possible], atol=1e-3
            )


def test_at_temperature_0_only_the_warped_distribution_is_one_hot(target):
    pair = bass.Pair(target, tiny.model_drafter(target))
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(3, num_logprobs=1), max_new_tokens=12)
    for tokens, logprobs, token_logprobs in zip(run.tokens, run.logprobs, run.token_logprobs, strict=True):
        np.testing.assert_array_equal(token_logprobs.warped_logprobs, 0.0)
        np.testing.assert_array_equal(token_logprobs.raw_top_tokens[:, 0], tokens)
        np.testing.assert_allclose(token_logprobs.raw_top_logprobs[:, 0], logprobs, atol=1e-6)


def test_by_default_there_are_no_log_probabilities_of_alternatives(target):
    run = bass.generate(bass.Pair(target, NgramDrafter()), tiny.PROMPTS, max_new_tokens=3)
    assert run.token_logprobs is None


@pytest.mark.parametrize("num_logprobs", [-1, 101])
def test_a_number_of_alternatives_out_of_range_is_refused(num_logprobs):
    with pytest.raises(ValueError, match=f"num_logprobs={num_logprobs}: expected a whole number from 0 to 100"):
        bass.SpecConfig(num_logprobs=num_logprobs)
