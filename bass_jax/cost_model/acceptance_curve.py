"""Acceptance models: how many tokens a step emits in expectation."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bass_jax.typing import Array


def geometric_block_efficiency(rate: float, draft_len: int) -> float:
    """Mean tokens per target pass when every draft is accepted with probability `rate`, given those before it.

    ``1 + a + … + a^G = (1 - a^(G + 1)) / (1 - a)``, the bonus or residual token included.

    Raises:
        ValueError: if `rate` is not a probability, or `draft_len` is negative.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    if not 0 <= rate <= 1 or draft_len < 0:
        raise ValueError(f"rate={rate}, draft_len={draft_len}: expected 0 <= rate <= 1 and draft_len >= 0")
    return draft_len + 1.0 if rate == 1 else (1 - rate ** (draft_len + 1)) / (1 - rate)


def expected_emitted(rates: Array, draft_lens: Array) -> Array:
    """Mean tokens of a step that drafts `draft_lens`.

    Args:
        rates: ``[P]``: probability that draft i is accepted, given that those before it were.
        draft_lens: any shape, int32; lengths past P count as P.
    """
    emitted = jnp.concatenate([jnp.ones(1), 1 + jnp.cumsum(jnp.cumprod(rates))])
    return emitted[jnp.clip(draft_lens, 0, rates.shape[0])]


def synchronized_block_efficiency(rate: float, draft_len: int, num_rows: int) -> float:
    """Mean tokens per pass if all rows must advance by the same count: one rejection stops everybody.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 3.
    """
    return geometric_block_efficiency(rate**num_rows, draft_len)


def fit_power_distribution(rates: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Fits ``l(s) = c s^gamma`` to the mean accepted drafts of ``s = 1 … P``, by least squares of the logarithms.

    Args:
        rates: ``[P]``, by position.

    Returns:
        ``(c, gamma)``.

    Raises:
        ValueError: if no draft is ever accepted.

    Source: Su et al. 2023 (arXiv 2310.18813), section 4.
    """
    accepted = np.cumsum(np.cumprod(np.asarray(rates, np.float64)))
    if accepted.size == 0 or accepted[0] <= 0:
        raise ValueError(f"rates={list(accepted)}: expected at least one position with accepted drafts")
    lengths = np.arange(1, len(accepted) + 1)
    if len(accepted) == 1:
        return float(accepted[0]), 0.0
    gamma, intercept = np.polyfit(np.log(lengths), np.log(accepted), 1)
    return float(np.exp(intercept)), float(gamma)


def power_law_rates(c: float, gamma: float, num_positions: int) -> tuple[float, ...]:
    """The acceptance by position under which the mean accepted drafts of ``s = 1 … P`` are ``c s^gamma``.

    Raises:
        ValueError: if no probabilities give that.
    """
    accepted = c * np.arange(1, num_positions + 1, dtype=np.float64) ** gamma
    is_accepted = np.diff(accepted, prepend=0.0)  # probability that all of the first i drafts are accepted
    if not (0 < c <= 1 and 0 <= gamma <= 1) or (np.diff(is_accepted) > 1e-12).any():
        raise ValueError(f"c={c}, gamma={gamma}: expected 0 < c <= 1 and 0 <= gamma <= 1")
    previous = np.concatenate([[1.0], is_accepted[:-1]])
    return tuple(
        float(rate) for rate in np.divide(is_accepted, previous, out=np.zeros_like(is_accepted), where=previous > 0)
    )
