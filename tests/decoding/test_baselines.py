"""The naive baseline: as exact as any step, and as slow as arithmetic says."""

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.cost_model import geometric_block_efficiency
from tests import tiny


@pytest.fixture(scope="module")
def pair() -> bass.Pair:
    target = tiny.model(0)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.03)))


def test_greedy_tokens_are_those_of_regular_decoding(pair):
    options = {"max_new_tokens": 24}
    regular = bass.generate(pair, tiny.PROMPTS, step="decode", **options)
    synchronized = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(3), step="synchronized", **options)
    for one, other in zip(synchronized.tokens, regular.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    assert synchronized.summary.block_efficiency > 1.05


def test_rows_that_go_on_advance_alike(pair):
    spec = bass.SpecConfig(3)
    run = bass.generate(
        pair, tiny.PROMPTS, spec, step="synchronized", sampling=bass.SamplingParams(temperature=1.0), max_new_tokens=40
    )
    for info in run.infos:
        goes_on = np.asarray(info.is_active) & (np.asarray(info.finish) == bass.FinishReason.RUNNING)
        assert len(set(np.asarray(info.num_emitted)[goes_on].tolist())) <= 1
    assert max(len(set(np.asarray(info.num_accepted)[:3].tolist())) for info in run.infos) > 1


def test_one_rejection_stops_everybody(pair):
    """BASS, section 3: at acceptance 0.8, five rows synchronized make about 1.5 tokens a round."""
    spec, prompts = bass.SpecConfig(4, "synthetic(0.8)"), [[1, 2, 3]] * 5
    found = {
        step: np.mean([
            bass.generate(pair, prompts, spec, step=step, max_new_tokens=200, seeds=range(seed, seed + 5),
                          stop_tokens=()).summary.block_efficiency
            for seed in range(0, 15, 5)
        ])
        for step in ("synchronized", "speculate")
    }  # fmt: skip
    # Some 400 rounds synchronized with a standard deviation of about 0.8 tokens each: 0.04.
    assert found["synchronized"] == pytest.approx(geometric_block_efficiency(0.8**5, 4), abs=4 * 0.04)
    assert found["speculate"] == pytest.approx(geometric_block_efficiency(0.8, 4), abs=0.25)
    assert geometric_block_efficiency(0.8**5, 4) == pytest.approx(1.48, abs=0.02)


def test_a_rule_that_looks_ahead_is_refused(pair):
    with pytest.raises(ValueError, match=r"acceptance='block'.*synchronized"):
        bass.generate(
            pair,
            tiny.PROMPTS,
            bass.SpecConfig(3, "block"),
            step="synchronized",
            sampling=bass.SamplingParams(temperature=1.0),
        )
