"""The roofline model: a pass reads weights and caches, computes, and pays per layer."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.cost_model.devices import Device
from bass_jax.cost_model.pass_shape import PassShape
from bass_jax.cost_model.protocol import Leaf, Number
from bass_jax.typing import Array

CATCH_UP_CHUNK = 8
"""Tokens per row that a drafter reads in one pass while it catches up."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RooflineModel:
    """Seconds from bytes and FLOPs.

    Linear layers and attention are two stages; a stage takes the longer of reading and computing, and the share of
    the shorter that does not overlap.

    Attributes:
        target: shape of the target.
        draft: shape of the draft; all zeros for a drafter that costs nothing.
        flops_per_second: reached by products.
        bytes_per_second: reached by reads.
        layer_seconds: per layer and pass.
        overlap: 0 to 1.
        draft_window: most committed tokens that the draft attends to.
    """

    target: Leaf
    draft: Leaf
    flops_per_second: Leaf
    bytes_per_second: Leaf
    layer_seconds: Leaf
    overlap: Leaf
    draft_window: Leaf = float("inf")

    def pass_seconds(self, shape: PassShape, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Time of one pass of a model of `shape`."""
        rows, context = jnp.asarray(num_rows, jnp.float32), jnp.asarray(context, jnp.float32)
        num_positions = rows * num_tokens
        linear = self._stage(jnp.asarray(shape.weight_bytes), num_positions * shape.flops)
        attention = self._stage(
            rows * context * shape.cache_bytes, num_positions * context * shape.attention_flops
        )  # fmt: skip
        return shape.num_layers * self.layer_seconds + linear + attention

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Time of a target pass."""
        return self.pass_seconds(self.target, num_rows, num_tokens, context)

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """A pass of two tokens, then of one per draft; before them the passes that catch up."""
        context = jnp.minimum(jnp.asarray(context, jnp.float32), self.draft_window)

        def seconds(num_tokens):
            return self.pass_seconds(self.draft, num_rows, num_tokens, context)

        num_drafts = jnp.asarray(num_drafts)
        num_reads = jnp.ceil(jnp.asarray(num_behind) / CATCH_UP_CHUNK)
        total = seconds(2) + (num_drafts - 1) * seconds(1) + num_reads * seconds(CATCH_UP_CHUNK)
        return jnp.where(num_drafts > 0, total, 0.0)

    def _stage(self, num_bytes: Array, flops: Array) -> Array:
        reading, computing = num_bytes / self.bytes_per_second, flops / self.flops_per_second
        return jnp.maximum(reading, computing) + (1 - self.overlap) * jnp.minimum(reading, computing)


def roofline(
    target: PassShape, draft: PassShape, device: Device, *, draft_window: float | int = float("inf")
) -> RooflineModel:
    """Makes the model of a pair on `device`."""
    return RooflineModel(
        target, draft, device.peak_flops * device.compute_efficiency, device.bandwidth * device.bandwidth_efficiency,
        device.layer_seconds, device.overlap, draft_window,
    )  # fmt: skip


def fit_roofline(
    shapes: Sequence[PassShape],
    num_rows: Sequence[float | int],
    num_tokens: Sequence[float | int],
    contexts: Sequence[float | int],
    seconds: Sequence[float | int],
) -> tuple[float, float, float]:
    """Fits launch time, bandwidth and FLOP rate to measured passes, without overlap.

    Least squares of the relative errors under non-negative coefficients; what the passes do not determine (a
    bandwidth, where computing always dominates) comes out as infinite.

    Args:
        shapes: of the model that each pass was of.
        num_rows: of each pass.
        num_tokens: T of each pass.
        contexts: of each pass.
        seconds: of each pass.

    Returns:
        ``(flops_per_second, bytes_per_second, layer_seconds)``.

    Raises:
        ValueError: if there are fewer than three passes.
    """
    if len(seconds) < 3:
        raise ValueError(f"seconds has {len(seconds)} values: expected at least 3 passes")
    from scipy.optimize import nnls

    rows, tokens, context = (np.asarray(values, np.float64) for values in (num_rows, num_tokens, contexts))
    weights, cache, flops, attention, layers = np.asarray(shapes, np.float64).T
    design = np.stack(
        [layers, weights + rows * context * cache, rows * tokens * (flops + context * attention)], axis=1
    )  # fmt: skip
    scale = design.max(axis=0)
    relative = design / scale / np.asarray(seconds)[:, None]
    per_layer, per_byte, per_flop = nnls(relative, np.ones(len(relative)))[0] / scale
    with np.errstate(divide="ignore"):
        return float(np.divide(1.0, per_flop)), float(np.divide(1.0, per_byte)), float(per_layer)
