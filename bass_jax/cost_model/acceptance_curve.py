"""The expected number of tokens that a step emits, computed from acceptance rates."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from bass_jax.typing import Array


def geometric_tokens_per_pass(rate: float, draft_len: int) -> float:
    """Returns the mean tokens per target pass, ``1 + a + … + a^G``, for the same acceptance rate a at all positions.

    Raises:
        ValueError: if `rate` is not a probability, or `draft_len` is negative.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    if not 0 <= rate <= 1 or draft_len < 0:
        raise ValueError(f"rate={rate}, draft_len={draft_len}: expected 0 <= rate <= 1 and draft_len >= 0")
    return draft_len + 1.0 if rate == 1 else (1 - rate ** (draft_len + 1)) / (1 - rate)


def expected_emitted(rates: Array, draft_lens: Array) -> Array:
    """Returns the mean tokens of a step with `draft_lens` drafts, in the shape of `draft_lens`.

    Args:
        rates: ``[P]`` float32, the acceptance rate of draft i given that the drafts before it were accepted.
        draft_lens: any shape, int32; lengths above P count as P.
    """
    emitted = jnp.concatenate([jnp.ones(1), 1 + jnp.cumsum(jnp.cumprod(rates))])
    return emitted[jnp.clip(draft_lens, 0, rates.shape[0])]


def fit_power_law(rates: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Fits ``c s^gamma`` to the mean number of accepted drafts of ``s = 1 … P``, by least squares of the logarithms.

    Args:
        rates: ``[P]``, acceptance rate by position.

    Returns:
        ``(c, gamma)``.

    Raises:
        ValueError: if the first draft is never accepted.

    Source: Su et al. 2023 (arXiv 2310.18813), section 4.
    """
    accepted = np.cumsum(np.cumprod(np.asarray(rates, np.float64)))
    if accepted.size == 0 or accepted[0] <= 0:
        raise ValueError(f"rates={list(rates)}: expected at least one position with accepted drafts")
    if len(accepted) == 1:
        return float(accepted[0]), 0.0
    gamma, intercept = np.polyfit(np.log(np.arange(1, len(accepted) + 1)), np.log(accepted), 1)
    return float(np.exp(intercept)), float(gamma)


def power_law_rates(c: float, gamma: float, num_positions: int) -> tuple[float, ...]:
    """Returns the acceptance rates by position for which ``c s^gamma`` of s drafts are accepted on average.

    Raises:
        ValueError: if no probabilities satisfy this.
    """
    accepted = c * np.arange(1, num_positions + 1, dtype=np.float64) ** gamma
    survival = np.diff(accepted, prepend=0.0)  # probability that the first i drafts are all accepted
    if not (0 < c <= 1 and 0 <= gamma <= 1) or (np.diff(survival) > 1e-12).any():
        raise ValueError(f"c={c}, gamma={gamma}: expected 0 < c <= 1 and 0 <= gamma <= 1")
    previous = np.concatenate([[1.0], survival[:-1]])
    rates = np.divide(survival, previous, out=np.zeros_like(survival), where=previous > 0)
    return tuple(rates.tolist())
