"""Whether two ways of sampling differ: a permutation test within problems."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

NUM_PERMUTATIONS = 10_000


class TwoSampleTest(NamedTuple):
    """Two sets of samples of the same problems."""

    num_samples: tuple[int, int]
    means: tuple[float, float]  # over problems
    p_value: float  # probability of a difference at least this large if both have the same distribution


def permutation_test(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    *,
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = 0,
) -> TwoSampleTest:
    """Tests whether the values of both have the same distribution, problem by problem.

    Under the null hypothesis the samples of a problem are exchangeable between the two, so shuffling them inside each
    problem gives the distribution of the difference of the means, whatever the distribution of the values. Two-sided;
    the observed arrangement counts as one of the permutations, so the p-value is never 0.

    Args:
        first: values per problem.
        second: likewise; problems that only one of them has are left out.
        num_permutations: drawn at random.
        seed: of the draw.

    Raises:
        ValueError: if no problem is in both.
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
    # Sums in another order round otherwise.
    is_as_large = np.abs(shuffled) >= abs(observed) - 1e-9 * max(1.0, abs(observed))
    p_value = float((1 + is_as_large.sum()) / (1 + num_permutations))
    return TwoSampleTest((_count(first, problems), _count(second, problems)),
                         (_mean(first, problems), _mean(second, problems)), p_value)  # fmt: skip


def _count(values: Mapping[str, Sequence[float]], problems: Sequence[str]) -> int:
    return sum(len(values[problem]) for problem in problems)


def _mean(values: Mapping[str, Sequence[float]], problems: Sequence[str]) -> float:
    return float(np.mean([np.mean(values[problem]) for problem in problems]))
