"""The real decoder emits exactly the tokens of the reference decoder in plain Python."""

import jax
import pytest

import bass_jax as bass
from bass_jax.testing import logits_function, reference_decode
from tests import tiny
from tests.marks import mostly_slow

CASES = [(draft_len, temperature) for draft_len in (0, 3) for temperature in (0.0, 1.0)]


@pytest.fixture(scope="module")
def models() -> tuple[bass.models.Model, bass.models.Model]:
    target = tiny.model(1)
    return target, tiny.perturbed(target, 0.2)


@pytest.mark.parametrize("stop_tokens", [(), (3, 5)])
@pytest.mark.parametrize("draft_len, temperature", mostly_slow(CASES, lambda case: case in ((0, 0.0), (3, 1.0))))
def test_the_tokens_are_those_of_the_reference_decoder(models, draft_len, temperature, stop_tokens):
    target, draft = models
    options = {"max_new_tokens": 20, "key": jax.random.key(7), "stop_tokens": stop_tokens}
    functions = logits_function(target), logits_function(draft)
    expected = reference_decode(*functions, tiny.PROMPTS, draft_len=draft_len, temperature=temperature, **options)
    pair = bass.Pair(target, tiny.model_drafter(draft))
    step = "speculate" if draft_len else "decode"
    sampling = bass.SamplingParams(temperature=temperature)
    output = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(draft_len), sampling=sampling, step=step, **options)
    assert [row.tolist() for row in output.tokens] == expected
