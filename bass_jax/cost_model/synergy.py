"""The latency model of Su et al.: a pass costs alpha_b per draft and beta, drafts are accepted as ``c s^gamma``."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.cost_model.protocol import Leaf, Number
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SynergyModel:
    """Time of N tokens with s drafts per step: ``N (alpha_b s + beta + t_S s) / (c s^gamma + 1)``.

    Attributes:
        batches: ``[b]`` float32, ascending: the batch sizes of `alphas`.
        alphas: ``[b]`` float32, seconds per draft position that the target verifies.
        beta: seconds of a target pass without drafts.
        draft: t_S, seconds per draft.
        c: of the accepted drafts, ``c s^gamma``.
        gamma: below 1.

    Source: Su et al. 2023 (arXiv 2310.18813), section 4.
    """

    batches: Leaf
    alphas: Leaf
    beta: Leaf
    draft: Leaf
    c: Leaf
    gamma: Leaf

    def alpha(self, num_rows: Number) -> Array:
        """Interpolates between the batch sizes."""
        return jnp.interp(jnp.asarray(num_rows, jnp.float32), jnp.asarray(self.batches), jnp.asarray(self.alphas))

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """``alpha_b s + beta``; the model knows no context."""
        del context
        return self.alpha(num_rows) * (jnp.asarray(num_tokens) - 1) + self.beta

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """``t_S s``, whatever the drafter has to catch up with."""
        del num_rows, context, num_behind
        return self.draft * jnp.asarray(num_drafts)

    def seconds_per_token(self, num_rows: int, draft_len: float | int) -> float:
        """The objective: seconds per emitted token of a row."""
        step = float(self.alpha(num_rows) + self.draft) * draft_len + float(self.beta)
        return step / (1 + (self.c * draft_len**self.gamma if draft_len else 0.0))

    def optimum(self, num_rows: int) -> float:
        """The real s that minimizes the time; never 0, since the model's first bit of a draft costs nothing."""
        slope = float(self.alpha(num_rows)) + float(self.draft)
        return synergy_optimum(slope, float(self.beta), float(self.c), float(self.gamma))

    def best_draft_len(self, num_rows: int, lengths: Sequence[int] = tuple(range(33))) -> int:
        """The whole s among `lengths` that minimizes the time."""
        return min(lengths, key=lambda length: self.seconds_per_token(num_rows, length))


def synergy_optimum(slope: float | int, beta: float | int, c: float | int, gamma: float | int) -> float:
    """Solves ``c (1 - gamma) A s^gamma - c gamma beta s^(gamma - 1) + A = 0`` for s, where A is `slope`.

    The left side rises from minus infinity, so there is one root.

    Raises:
        ValueError: if an argument is not positive, or `gamma` not below 1.
    """
    if min(slope, beta, c, gamma) <= 0 or gamma >= 1:
        raise ValueError(f"slope={slope}, beta={beta}, c={c}, gamma={gamma}: expected above 0, and gamma below 1")

    def derivative(s: float) -> float:
        return c * (1 - gamma) * slope * s**gamma - c * gamma * beta * s ** (gamma - 1) + slope

    low, high = 1e-9, 1.0
    while derivative(high) < 0:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if derivative(middle) < 0 else (low, middle)
    return (low + high) / 2


def fit_synergy(
    batches: Sequence[int],
    widths: Sequence[int],
    seconds: np.ndarray,
    draft: float,
    power_distribution: tuple[float, float],
) -> SynergyModel:
    """Fits alpha per batch and one beta, by least squares of the relative errors.

    Args:
        batches: ``[b]``.
        widths: ``[w]``, T of the passes, ``s + 1``.
        seconds: ``[b, w]``, measured.
        draft: t_S.
        power_distribution: ``(c, gamma)``.
    """
    seconds = np.asarray(seconds, np.float64)
    num_batches, num_widths = seconds.shape
    drafts = np.asarray(widths, np.float64) - 1
    design = np.zeros((num_batches, num_widths, num_batches + 1))
    for i in range(num_batches):
        design[i, :, i] = drafts
    design[..., -1] = 1.0
    weighted = (design / seconds[..., None]).reshape(-1, num_batches + 1)
    solution = np.linalg.lstsq(weighted, np.ones(len(weighted)), rcond=None)[0]
    return SynergyModel(
        jnp.asarray(batches, jnp.float32), jnp.asarray(np.maximum(solution[:-1], 0), jnp.float32),
        float(solution[-1]), float(draft), *map(float, power_distribution),
    )  # fmt: skip
