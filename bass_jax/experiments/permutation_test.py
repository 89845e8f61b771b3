"""A permutation test within problems, for whether two sets of samples have the same distribution."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class TwoSampleTest(NamedTuple):
    """The result of a comparison of two sets of samples of the same problems."""

    num_samples: tuple[int, int]
    means: tuple[float, float]  # over problems
    p_value: float  # probability of a difference at least this large if both have the same distribution


def permutation_test(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    *,
    num_permutations: int = 10_000,
    seed: int = 0,
) -> TwoSampleTest:
    """Tests whether the values of both sets have the same distribution, problem by problem.

    Under the null hypothesis the samples of a problem are exchangeable between the sets. Shuffling them within each
    problem therefore gives the distribution of the difference of the means, for any distribution of the values. The
    test is two-sided. The observed arrangement counts as one of the permutations, so the p-value is never 0.

    Args:
        first: problem → values.
        second: problem → values; problems in only one of the sets are left out.
        num_permutations: number of random permutations.
        seed: of the permutations.

    Raises:
        ValueError: if no problem is in both sets.
    """
    problems = [problem for problem in first if problem in second]
    if not problems:
        raise ValueError("first, second: expected problems that both have")
    random = np.random.default_rng(seed)
    observed, shuffled = 0.0, np.zeros(num_permutations)
    for problem in problems:
        one, other = np.asarray(first[problem], float), np.asarray(second[problem], float)
        pooled = np.concatenate([one, other])
        observed += one.mean() - other.mean()
        if (pooled == pooled[0]).all():
            continue
        drawn = random.permuted(np.broadcast_to(pooled, (num_permutations, len(pooled))), axis=1)
        shuffled += drawn[:, : len(one)].mean(axis=1) - drawn[:, len(one) :].mean(axis=1)
    # The tolerance is for sums that differ only in the order of their terms.
    is_as_large = np.abs(shuffled) >= abs(observed) - 1e-9 * max(1.0, abs(observed))
    sets = [[values[problem] for problem in problems] for values in (first, second)]
    num_first, num_second = (sum(map(len, values)) for values in sets)
    mean_first, mean_second = (float(np.mean([np.mean(one) for one in values])) for values in sets)
    p_value = float((1 + is_as_large.sum()) / (1 + num_permutations))
    return TwoSampleTest((num_first, num_second), (mean_first, mean_second), p_value)
