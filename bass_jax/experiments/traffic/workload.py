"""The requests of a run: arrival times and lengths, and in simulated time which drafts are accepted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_DRAFTS = 32
"""The largest number of drafts per step that acceptance is sampled for."""


class Workload(NamedTuple):
    """Requests (R), in the order of arrival."""

    times: np.ndarray  # [R] float64 seconds
    prompt_tokens: np.ndarray  # [R] int
    new_tokens: np.ndarray  # [R] int, length of the output
    limits: np.ndarray  # [R] int, largest length of the output
    acceptable: list[np.ndarray]  # R x [new_tokens] int, drafts that are accepted from each position; [] in real time


def sample_lengths(bounds: Sequence[int], num: int, random: np.random.Generator) -> np.ndarray:
    """Samples lengths between two bounds, both included: ``[num]`` int."""
    return random.integers(bounds[0], bounds[1] + 1, num)


def sample_acceptable(rates: Sequence[float], num_tokens: np.ndarray, seed: int) -> list[np.ndarray]:
    """Samples how many drafts are accepted from each position of each output on.

    Positions are sampled independently of the policy, so that all policies have the same acceptance. i drafts are
    accepted with probability ``rates[0] … rates[i - 1]``, which gives the mean number of accepted drafts by the rates.

    Args:
        rates: acceptance by position, given that the drafts before are accepted; the last one is repeated.
        num_tokens: ``[R]`` int, lengths of the outputs.
        seed: of the samples.
    """
    padded = [*rates, *[rates[-1]] * (MAX_DRAFTS - len(rates))][:MAX_DRAFTS]
    probs = np.cumprod(padded)
    found = []
    for index, num in enumerate(num_tokens):
        uniform = np.random.default_rng((seed, index)).random(int(num))
        found.append((uniform[:, None] < probs).sum(axis=1))
    return found
