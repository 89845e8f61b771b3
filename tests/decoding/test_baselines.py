"""The synchronized baseline: its tokens are those of any other step, and its speed is what the closed form says."""

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.cost_model import geometric_tokens_per_pass
from bass_jax.drafters.template import RepeatDrafter
from tests import tiny


@pytest.fixture(scope="module")
def pair() -> bass.Pair:
    target = tiny.model(0)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.03)))


def test_greedy_tokens_equal_those_of_regular_decoding(pair):
    options = {"max_new_tokens": 24}
    regular = bass.generate(pair, tiny.PROMPTS, step="decode", **options)
    synchronized = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), step="synchronized", **options)
    for one, other in zip(synchronized.tokens, regular.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    assert synchronized.metrics.tokens_per_pass > 1.05


@pytest.mark.slow
def test_all_running_rows_advance_by_the_same_number_of_tokens(pair):
    sampling = bass.SamplingParams(temperature=1.0)
    run = bass.generate(
        pair, tiny.PROMPTS, bass.SpecConfig(4), step="synchronized", sampling=sampling, max_new_tokens=40
    )
    for info in run.infos:
        is_running = np.asarray(info.is_active) & (np.asarray(info.finish) == bass.FinishReason.RUNNING)
        assert len(set(np.asarray(info.num_emitted)[is_running].tolist())) <= 1
    assert max(len(set(np.asarray(info.num_accepted)[:3].tolist())) for info in run.infos) > 1


@pytest.mark.slow
def test_tokens_per_pass_equals_the_closed_form(pair):
    """At acceptance 0.8, five synchronized rows emit about 1.5 tokens per step (BASS, section 3)."""
    spec, prompts = bass.SpecConfig(4, "synthetic(0.8)"), [[1, 2, 3]] * 5
    pair = pair.with_drafter(RepeatDrafter())
    options = {"max_new_tokens": 200, "stop_tokens": ()}

    def tokens_per_pass(step):
        batches = [range(start, start + 5) for start in range(0, 15, 5)]
        runs = [bass.generate(pair, prompts, spec, step=step, seeds=seeds, **options) for seeds in batches]
        return np.mean([run.metrics.tokens_per_pass for run in runs])

    # About 400 synchronized steps with a standard deviation of 0.8 tokens: the mean has one of 0.04.
    expected = geometric_tokens_per_pass(0.8**5, 4)
    assert tokens_per_pass("synchronized") == pytest.approx(expected, abs=4 * 0.04)
    assert tokens_per_pass("speculate") == pytest.approx(geometric_tokens_per_pass(0.8, 4), abs=0.25)
    assert expected == pytest.approx(1.48, abs=0.02)


def test_a_rule_that_uses_later_drafts_is_refused(pair):
    sampling = bass.SamplingParams(temperature=1.0)
    with pytest.raises(ValueError, match=r"acceptance='block'.*synchronized"):
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4, "block"), step="synchronized", sampling=sampling)
