"""Per-row sampling settings, traced: sweeping one never recompiles."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bass_jax.typing import Array

Setting = float | int | Sequence[float | int] | np.ndarray
"""One value for all rows, or one per row."""


class SamplingControls(NamedTuple):
    """What `bass_jax.sampling.law.make_law` reads, one value per row."""

    temperature: Array | np.ndarray  # [B] float32, 0 = greedy
    top_k: Array | np.ndarray  # [B] int32, 0 = off
    top_p: Array | np.ndarray  # [B] float32, 1 = off
    min_p: Array | np.ndarray  # [B] float32, 0 = off


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the target's law, in the order of the fields.

    Each is one value for all rows or a sequence with one per row.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keeps the k most probable tokens; 0 keeps all.
        top_p: keeps the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
        min_p: keeps tokens at least this fraction as probable as the most probable; 0 keeps all.
    """

    temperature: Setting = 0.0
    top_k: Setting = 0
    top_p: Setting = 1.0
    min_p: Setting = 0.0

    def __post_init__(self):
        checks = {
            "temperature": (lambda x: x >= 0 and math.isfinite(x), "a finite number of at least 0"),
            "top_k": (lambda x: x >= 0 and float(x).is_integer(), "a whole number of at least 0"),
            "top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
            "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        }
        for name, (is_valid, expected) in checks.items():
            for value in np.ravel(np.asarray(getattr(self, name))):
                if not is_valid(value):
                    raise ValueError(f"{name}={value}: expected {expected}")

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the most probable token."""
        return not np.any(np.asarray(self.temperature))

    def controls(self, num_rows: int) -> SamplingControls:
        """Spreads the settings over `num_rows` rows.

        Raises:
            ValueError: if a setting has one value per row and their number differs.
        """

        def spread(name: str, dtype) -> np.ndarray:
            value = np.asarray(getattr(self, name), dtype)
            if value.ndim and value.shape != (num_rows,):
                raise ValueError(f"{name} has {value.size} values: expected 1 or {num_rows}, one per row")
            return np.broadcast_to(value, (num_rows,)).copy()

        return SamplingControls(
            temperature=spread("temperature", np.float32),
            top_k=spread("top_k", np.int32),
            top_p=spread("top_p", np.float32),
            min_p=spread("min_p", np.float32),
        )
