"""`verify_lossless`: its statistic, its report and its errors."""

import numpy as np
import pytest
import scipy.stats

from bass_jax.drafters import NgramDrafter
from bass_jax.testing import tiny_target, verify_lossless
from bass_jax.testing.enumeration import reference_distribution
from bass_jax.testing.lossless import chi_square
from tests import tiny


def test_the_p_values_of_an_exact_decoder_are_uniform():
    """With rare cells, which are pooled, the p-value is below a significance with about that probability."""
    random = np.random.default_rng(0)
    distributions = random.dirichlet(np.full(40, 0.3), 3)
    p_values = [
        chi_square(np.stack([random.multinomial(500, distribution) for distribution in distributions]), distributions)
        for _ in range(2000)
    ]
    assert scipy.stats.kstest(p_values, "uniform").statistic < 0.05
    shifted = 0.9 * distributions + 0.1 / 40
    counts = np.stack([random.multinomial(5000, distribution) for distribution in shifted])
    assert chi_square(counts, distributions) < 1e-6


def test_a_token_of_probability_0_gives_p_value_0():
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
def test_the_reference_distribution_of_a_small_example(setting, expected):
    found = reference_distribution(np.log([0.5, 0.3, 0.15, 0.05]), **setting)
    np.testing.assert_allclose(found, np.array(expected) / np.sum(expected), rtol=1e-9)


def test_a_report_describes_an_exact_decoder():
    report = verify_lossless(tiny.table_drafter(5), num_samples=8000)
    assert report.is_lossless
    assert report.claims_lossless
    assert report.total_variation == pytest.approx(report.expected_variation, rel=0.1)
    assert 1 < report.tokens_per_step < 4
    assert str(report).startswith("token (lossless): keeps the target's distribution: p = ")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_a_report_describes_a_lossy_rule(rule):
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
def test_an_invalid_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        verify_lossless(NgramDrafter(), **options)
