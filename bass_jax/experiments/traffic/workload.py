"""What is asked for: arrivals with lengths, and in simulation what will be accepted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.analysis.replay import Replay
from bass_jax.cost_model.acceptance_curve import power_law_rates

MAX_DRAFTS = 32
"""Drafts per step that a simulated text has acceptances for."""


class Workload(NamedTuple):
    """Requests in the order in which they come."""

    times: np.ndarray  # [R] float64 seconds
    prompt_tokens: np.ndarray  # [R] int
    new_tokens: np.ndarray  # [R] int, what the answer comes to
    limits: np.ndarray  # [R] int, what it may come to
    acceptable: list[np.ndarray]  # R x [new_tokens] int, drafts that stand if drafting begins there; [] in real time


def draw_lengths(bounds: Sequence[int], num: int, random: np.random.Generator) -> np.ndarray:
    """Draws whole numbers between two bounds, both included: ``[num]`` int."""
    return random.integers(bounds[0], bounds[1] + 1, num)


def draw_acceptable(rates: Sequence[float], num_tokens: np.ndarray, seed: int) -> list[np.ndarray]:
    """Draws for every position of every text how many drafts would be accepted from there on.

    Text by text and position by position, so that every policy meets the same ones. A run of i drafts stands with
    probability ``rates[0] … rates[i - 1]``: the mean of what is accepted of s drafts is that of the rates, for any s.

    Args:
        rates: acceptance by position, given that those before were accepted; the last serves those after it.
        num_tokens: ``[R]`` of the texts.
        seed: of the draw.
    """
    padded = [*rates, *[rates[-1]] * (MAX_DRAFTS - len(rates))][:MAX_DRAFTS]
    is_accepted = np.cumprod(padded)
    found = []
    for index, num in enumerate(num_tokens):
        draws = np.random.default_rng((seed, index)).random(int(num))
        found.append((draws[:, None] < is_accepted).sum(axis=1))
    return found


def acceptance_rates(c: float, gamma: float) -> tuple[float, ...]:
    """Acceptance by position of texts in which ``c s^gamma`` of s drafts are accepted."""
    return power_law_rates(c, gamma, MAX_DRAFTS)


def replayed(replay: Replay, times: np.ndarray, seed: int) -> Workload:
    """Requests drawn from the rows of a recorded run, each with the acceptances of its own text."""
    rows = np.random.default_rng(seed).integers(0, len(replay.num_tokens), len(times))
    return Workload(
        times=times,
        prompt_tokens=replay.prompt_lengths[rows],
        new_tokens=replay.num_tokens[rows],
        limits=replay.limits[rows],
        acceptable=[replay.acceptable[row, : replay.num_tokens[row]] for row in rows],
    )
