"""Builds the optimizer of a distillation."""

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from bass_jax.training.distill_config import OptimizerConfig
from bass_jax.typing import Params

_INPUT_AXES = {
    "qkv": (0,), "out": (0, 1, 2), "gate_up": (0,), "down": (0,), "hidden_projection": (0,), "hidden_output": (0,)
}  # fmt: skip
_OUTPUT_AXES = {
    "qkv": (1, 2, 3), "out": (3,), "gate_up": (1, 2), "down": (1,), "hidden_projection": (1,), "hidden_output": (1,)
}  # fmt: skip

_MUON_COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5
"""Of the five Newton-Schulz iterations: Optax's own, but one by one, which makes Optax loop over them. Given once, they
are unrolled, and XLA for a CPU computes the sums of all iterations before again at every transpose: 137 ms a step where
a loop takes 64 (the quickstart's draft on two cores, 2026-11-23, medians of twelve, in turns)."""


def schedule(config: OptimizerConfig, peak: float, num_steps: int) -> optax.Schedule:
    """Learning rate of every step: a linear rise to `peak`, then the configured decay."""
    warm_up = min(config.warmup_steps, num_steps // 2)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warm_up, num_steps, peak * config.final_share)
    decay = max(1, min(round(num_steps * config.decay_share), num_steps - warm_up))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warm_up),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak * config.final_share, decay),
        ],
        [warm_up, num_steps - decay],
    )


def make_optimizer(config: OptimizerConfig, num_steps: int, accumulate: int = 1) -> optax.GradientTransformation:
    """AdamW or Muon, behind a clip of the whole gradient's norm, on the mean gradient of `accumulate` batches."""
    rate = schedule(config, config.learning_rate, num_steps)
    if config.kind == "adamw":
        inner = optax.adamw(
            rate, b2=config.beta2, weight_decay=config.weight_decay, mask=lambda params: _is_matrix(params)
        )
    else:
        inner = muon(
            schedule(config, config.muon_learning_rate, num_steps),
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
    """Which axes of a layer's tensor are its matrix's rows and columns; None leaves it to AdamW."""

    def axes(path, leaf):
        name = path[-1].key
        return MuonDimensionNumbers(_INPUT_AXES[name], _OUTPUT_AXES[name]) if name in _INPUT_AXES else None

    return jax.tree_util.tree_map_with_path(axes, params)
