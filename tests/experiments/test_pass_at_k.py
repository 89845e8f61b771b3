"""Pass@k against cases worked by hand, the permutation test against equal and different distributions, and spreads."""

import itertools
import math

import numpy as np
import pytest

from bass_jax.experiments.pass_at_k import Answer, mean_pass_at_k, pass_all, pass_at_k, pass_first, share_ended
from bass_jax.experiments.permutation_test import permutation_test
from bass_jax.runtime.statistics import Spread, bootstrap, percentiles, spread_of_rounds


@pytest.mark.parametrize(("num_samples", "num_passed"), [(5, 0), (5, 1), (5, 3), (5, 5)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_one_that_passes(num_samples, num_passed):
    passed = [True] * num_passed + [False] * (num_samples - num_passed)
    for k in range(1, num_samples + 1):
        subsets = list(itertools.combinations(passed, k))
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(np.mean([any(one) for one in subsets]))
    with pytest.raises(ValueError, match="k=6"):
        pass_at_k(num_samples, num_passed, 6)


ANSWERS = {
    # The most probable answer fails and another passes. Of those that ended within a second, the most probable passes.
    "a": [Answer(0.0, -0.1, 3.0, True), Answer(1.0, -0.2, 1.0, True)],
    # The most probable answer passes, but ends late.
    "b": [Answer(1.0, -0.1, 2.0, True), Answer(0.0, -0.5, 0.5, True)],
    # The time budget cut the passing answer off, so it does not count.
    "c": [Answer(1.0, -0.1, 2.0, False), Answer(0.0, -math.inf, 0.1, True)],
}


@pytest.mark.parametrize(
    ("budget", "first", "every", "share"),
    [
        (0.0, 0, 0, 0),
        (0.6, 0, 0, 2 / 6),
        (1.0, 1 / 3, 1 / 3, 3 / 6),
        (2.0, 2 / 3, 2 / 3, 4 / 6),
        (9.0, 1 / 3, 2 / 3, 5 / 6),
    ],
)
def test_only_answers_that_ended_within_the_budget_count(budget, first, every, share):
    assert pass_first(ANSWERS, budget) == pytest.approx(first)
    assert pass_all(ANSWERS, budget) == pytest.approx(every)
    assert share_ended(ANSWERS, budget) == pytest.approx(share)


def test_mean_pass_at_k():
    assert mean_pass_at_k({"a": ANSWERS["a"], "b": ANSWERS["b"]}, 1) == pytest.approx(0.5)
    assert mean_pass_at_k({"a": ANSWERS["a"], "b": ANSWERS["b"]}, 2) == 1.0


def values(random, means, num, spread=1.0) -> dict[str, list[float]]:
    return {str(index): (mean + spread * random.normal(size=num)).tolist() for index, mean in enumerate(means)}


def test_the_permutation_tests_p_value_is_uniform_under_the_same_distribution():
    """Problems differ much more than the two sets, so that a test must compare within problems."""
    random = np.random.default_rng(0)
    p_values = []
    for _ in range(200):
        means = 5 * random.normal(size=6)
        one, other = values(random, means, 4), values(random, means, 4)
        p_values.append(permutation_test(one, other, num_permutations=200).p_value)
    # 200 uniform draws: the share below 0.1 is 0.1 with a standard deviation of 0.021.
    assert 0.1 - 4 * 0.021 < np.mean(np.array(p_values) < 0.1) < 0.1 + 4 * 0.021


def test_the_permutation_test_finds_a_difference_within_problems():
    random = np.random.default_rng(1)
    means = 5 * random.normal(size=30)
    found = permutation_test(values(random, means, 8), values(random, means + 0.5, 8))
    assert found.p_value < 1e-3
    assert found.num_samples == (240, 240)
    assert found.means[1] - found.means[0] == pytest.approx(0.5, abs=0.4)


def test_the_permutation_test_takes_unequal_numbers_and_constants():
    assert permutation_test({"a": [0.0] * 8}, {"a": [0.0] * 3}).p_value == 1.0
    assert permutation_test({"a": [1.0, 2.0], "b": [3.0]}, {"a": [2.0, 1.0, 1.5]}).num_samples == (2, 3)
    with pytest.raises(ValueError, match="both have"):
        permutation_test({"a": [1.0]}, {"b": [1.0]})


def test_spread_is_formatted_with_its_range():
    assert f"{Spread(1.25, 1.0, 2.0):.1f}" == "1.2 (1.0–2.0)"
    random = np.random.default_rng(2)
    draws = random.normal(size=400).tolist()
    found = bootstrap(lambda picked: float(np.mean(picked)), draws)
    # The 95 % interval of a mean of 400: 2 x 1.96 / 20 wide.
    assert found.high - found.low == pytest.approx(2 * 1.96 / 20, rel=0.25)


def test_the_spread_of_rounds_is_their_range():
    rounds = [([1.0, 3.0],), ([3.0, 5.0],), ([9.0],)]
    assert spread_of_rounds(lambda values: float(np.mean(values)), rounds) == Spread(4.0, 2.0, 9.0)
    assert spread_of_rounds(lambda values: None, rounds) is None
    assert spread_of_rounds(lambda values: float(np.mean(values)), rounds[2:]) == Spread(9.0, 9.0, 9.0)


def test_percentiles_are_interpolated():
    found = percentiles([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.p50) == (3.0, 3.0)
    assert (found.p90, found.p99) == (pytest.approx(4.6), pytest.approx(4.96))
