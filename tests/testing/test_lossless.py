"""The public check of a drafter or a rule: its statistic, its result, its refusals."""

import numpy as np
import pytest
import scipy.stats

from bass_jax.drafters import NgramDrafter
from bass_jax.testing.enumeration import reference_distribution
from bass_jax.testing.lossless import chi_square, tiny_target, verify_lossless
from tests import tiny


def test_the_p_value_is_scipys():
    """Within 2 % of the tail, which is what the approximation promises and more than a result needs."""
    random = np.random.default_rng(0)
    distributions = random.dirichlet(np.ones(30), 4)
    for shift in (0.0, 0.02, 0.05):
        drawn = (1 - shift) * distributions + shift / 30
        counts = np.stack([random.multinomial(4000, distribution) for distribution in drawn])
        found, expected = chi_square(counts, distributions), 0.0
        statistic, freedom = 0.0, 0
        for observed, distribution in zip(counts, distributions, strict=True):
            is_rare = distribution * 4000 < 5
            pooled = [np.append(x[~is_rare], x[is_rare].sum()) for x in (observed, distribution * 4000)]
            if pooled[1][-1] < 5:
                most = pooled[1][:-1].argmax()
                for x in pooled:
                    x[most] += x[-1]
                pooled = [x[:-1] for x in pooled]
            statistic += ((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum()
            freedom += len(pooled[0]) - 1
        expected = scipy.stats.chi2.sf(statistic, freedom)
        assert found == pytest.approx(expected, rel=0.02, abs=1e-12)


def test_an_impossible_token_is_fatal():
    assert chi_square(np.array([[1, 99_999]]), np.array([[0.0, 1.0]])) == 0.0
    assert chi_square(np.array([[0, 100_000]]), np.array([[0.0, 1.0]])) == 1.0


@pytest.mark.parametrize(
    "setting, expected",
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25, 0.09, 0.0225, 0.0025]),
        ({"top_k": 2}, [0.5, 0.3, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [0.5, 0.3, 0, 0]),
        ({"min_p": 0.3}, [0.5, 0.3, 0.15, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0.5, 0.3, 0, 0]),
    ],
)
def test_the_reference_law_by_hand(setting, expected):
    found = reference_distribution(np.log([0.5, 0.3, 0.15, 0.05]), **setting)
    np.testing.assert_allclose(found, np.array(expected) / np.sum(expected), rtol=1e-9)


def test_a_report_says_what_was_found():
    sound = verify_lossless(tiny.table_drafter(5), num_samples=8000)
    assert sound.is_lossless
    assert sound.claims_lossless
    assert sound.total_variation == pytest.approx(sound.expected_variation, rel=0.1)
    assert 1 < sound.tokens_per_step < 4
    assert str(sound).startswith("token (lossless): keeps the target's distribution: p = ")


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_a_lossy_rule_is_reported_with_its_distance(rule):
    report = verify_lossless(tiny.table_drafter(5), rule, num_samples=20_000)
    assert not report.claims_lossless
    assert not report.is_lossless
    assert report.total_variation > 2 * report.expected_variation
    assert str(report).startswith(f"{rule} (lossy by design): does NOT keep the target's distribution")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": tiny_target(12)}, "target has 12 tokens: expected at most 11"),
        ({"significance": 0.0}, r"significance=0\.0"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"rule": "tokens"}, "acceptance='tokens'"),
        ({"draft_len": 40}, "draft_len=40"),
    ],
)
def test_a_callers_mistake_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        verify_lossless(NgramDrafter(), **options)
