"""The optimizer of a distillation."""

import functools

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from bass_jax.training.distill_config import OptimizerConfig
from bass_jax.typing import Params

_MUON_AXES = {
    "qkv": MuonDimensionNumbers((3,), (0, 1, 2)),
    "out": MuonDimensionNumbers((1, 2, 3), (0,)),
    "gate_up": MuonDimensionNumbers((2,), (0, 1)),
    "down": MuonDimensionNumbers((1,), (0,)),
    "hidden_projection": MuonDimensionNumbers((1,), (0,)),
    "hidden_output": MuonDimensionNumbers((1,), (0,)),
}
"""The axes of a parameter that a product sums over, and its output channels. AdamW optimizes all others."""

_MUON_COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5
"""Optax's coefficients, given once for each of the five Newton-Schulz iterations, so that Optax loops over them.

Given once for all, the iterations are unrolled, and XLA on a CPU recomputes earlier iterations at every transpose: 137
ms per step instead of 64 (quickstart draft, two cores, 2026-11-23, medians of twelve, in turns).
"""


def learning_rate_schedule(config: OptimizerConfig, peak: float, num_steps: int) -> optax.Schedule:
    """Returns the learning rate of every step: a linear rise to `peak`, then the configured decay."""
    warm_up = min(config.warmup_steps, num_steps // 2)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warm_up, num_steps, peak * config.final_share)
    decay = max(1, min(round(num_steps * config.decay_share), num_steps - warm_up))
    parts = [
        optax.linear_schedule(0.0, peak, warm_up),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, peak * config.final_share, decay),
    ]
    return optax.join_schedules(parts, [warm_up, num_steps - decay])


@functools.cache
def make_optimizer(config: OptimizerConfig, num_steps: int, accumulate: int = 1) -> optax.GradientTransformation:
    """Returns AdamW or Muon after clipping by the global norm, on the mean gradient of `accumulate` batches.

    Equal arguments give the same object, so that a second training in a process does not compile its step again.
    """
    rate = learning_rate_schedule(config, config.learning_rate, num_steps)
    if config.kind == "adamw":
        inner = optax.adamw(rate, b2=config.beta2, weight_decay=config.weight_decay, mask=_is_matrix)
    else:
        inner = muon(
            learning_rate_schedule(config, config.muon_learning_rate, num_steps),
            adam_learning_rate=rate,
            adam_b2=config.beta2,
            adam_weight_decay=config.weight_decay,
            ns_coeffs=_MUON_COEFFICIENTS,
            muon_weight_dimension_numbers=_muon_axes,
        )
    whole = optax.chain(optax.clip_by_global_norm(config.clip_norm), inner)
    return whole if accumulate == 1 else optax.MultiSteps(whole, accumulate).gradient_transformation()


def _is_matrix(params: Params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _muon_axes(params: Params):
    return jax.tree_util.tree_map_with_path(lambda path, _: _MUON_AXES.get(path[-1].key), params)
