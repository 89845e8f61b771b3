"""The latency model of Su et al., linear in the number of drafts, with a power law for the accepted drafts."""

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
    """Models the time of N tokens with s drafts per step as ``N (alpha_b s + beta + t_S s) / (c s^gamma + 1)``.

    Attributes:
        batches: ``[b]`` float32, ascending: the batch sizes of `alphas`.
        alphas: ``[b]`` float32, seconds per draft position that the target verifies.
        beta: seconds of a target pass without drafts.
        draft: t_S, seconds per draft.
        c: factor of the mean number of accepted drafts, ``c s^gamma``.
        gamma: exponent, below 1.

    Source: Su et al. 2023 (arXiv 2310.18813), section 4.
    """

    batches: Leaf
    alphas: Leaf
    beta: Leaf
    draft: Leaf
    c: Leaf
    gamma: Leaf

    def alpha(self, num_rows: Number) -> Array:
        """Interpolates alpha between the batch sizes."""
        return jnp.interp(jnp.asarray(num_rows, jnp.float32), jnp.asarray(self.batches), jnp.asarray(self.alphas))

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Returns ``alpha_b s + beta``, independent of the context."""
        del context
        return self.alpha(num_rows) * (jnp.asarray(num_tokens) - 1) + self.beta

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """Returns ``t_S s``; catching up has no cost in this model."""
        del num_rows, context, num_behind
        return self.draft * jnp.asarray(num_drafts)

    def seconds_per_token(self, num_rows: int, draft_len: float | int) -> float:
        """Returns the seconds per emitted token of a row."""
        step = float(self.alpha(num_rows) + self.draft) * draft_len + float(self.beta)
        return step / (1 + (self.c * draft_len**self.gamma if draft_len else 0.0))

    def optimum(self, num_rows: int) -> float:
        """Returns the real s that minimizes the time.

        With ``A = alpha_b + t_S`` it solves ``c (1 - gamma) A s^gamma - c gamma beta s^(gamma - 1) + A = 0``. The left
        side increases from minus infinity at 0 and is A at ``gamma beta / ((1 - gamma) A)``, so there is one root.

        Raises:
            ValueError: if A, beta, c or gamma is not positive, or gamma is not below 1.
        """
        slope = float(self.alpha(num_rows)) + float(self.draft)
        beta, c, gamma = float(self.beta), float(self.c), float(self.gamma)
        if min(slope, beta, c, gamma) <= 0 or gamma >= 1:
            raise ValueError(f"slope={slope}, beta={beta}, c={c}, gamma={gamma}: expected above 0, and gamma below 1")
        from scipy.optimize import root_scalar

        def derivative(s: float) -> float:
            return c * (1 - gamma) * slope * s**gamma - c * gamma * beta * s ** (gamma - 1) + slope

        return root_scalar(derivative, bracket=(1e-9, gamma * beta / ((1 - gamma) * slope))).root

    def best_draft_len(self, num_rows: int, lengths: Sequence[int] = tuple(range(33))) -> int:
        """Returns the element of `lengths` that minimizes the time."""
        return min(lengths, key=lambda length: self.seconds_per_token(num_rows, length))


def fit_synergy(
    batches: Sequence[int], widths: Sequence[int], seconds: np.ndarray, draft: float, power_law: tuple[float, float]
) -> SynergyModel:
    """Fits one alpha per batch size and one beta, by least squares of the relative errors.

    Args:
        batches: ``[b]``.
        widths: ``[w]``, T of the passes, ``s + 1``.
        seconds: ``[b, w]``, measured times of target passes.
        draft: t_S.
        power_law: ``(c, gamma)``.
    """
    seconds = np.asarray(seconds, np.float64)
    num_batches, num_widths = seconds.shape
    design = np.zeros((num_batches, num_widths, num_batches + 1))
    for i in range(num_batches):
        design[i, :, i] = np.asarray(widths, np.float64) - 1
    design[..., -1] = 1.0
    weighted = (design / seconds[..., None]).reshape(-1, num_batches + 1)
    solution = np.linalg.lstsq(weighted, np.ones(len(weighted)), rcond=None)[0]
    alphas = jnp.asarray(np.maximum(solution[:-1], 0), jnp.float32)
    return SynergyModel(
        jnp.asarray(batches, jnp.float32), alphas, float(solution[-1]), float(draft), *map(float, power_law)
    )
