"""The roofline model: the time of a pass from its bytes, its FLOPs and a fixed time per layer."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.cost_model.devices import Device
from bass_jax.cost_model.pass_shape import PassShape
from bass_jax.cost_model.protocol import Leaf, Number
from bass_jax.drafters.autoregressive import CATCH_UP_CHUNK
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RooflineModel:
    """Computes seconds from bytes and FLOPs.

    Linear layers and attention are two stages. A stage takes the longer of its read and compute time, plus the share of
    the shorter one that does not overlap.

    Attributes:
        target: a `PassShape` of the target.
        draft: a `PassShape` of the draft model; ``PassShape()`` for drafts without cost.
        flops_per_second: that matrix products reach.
        bytes_per_second: that reads reach.
        layer_seconds: fixed time per layer and pass.
        overlap: 0 to 1.
        draft_window: largest number of committed tokens that the draft model attends to.
    """

    target: Leaf
    draft: Leaf
    flops_per_second: Leaf
    bytes_per_second: Leaf
    layer_seconds: Leaf
    overlap: Leaf
    draft_window: Leaf = float("inf")

    def pass_seconds(self, shape: PassShape, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Returns the time of one pass of a model with `shape`."""
        rows, context = jnp.asarray(num_rows, jnp.float32), jnp.asarray(context, jnp.float32)
        positions = rows * num_tokens
        linear = self._stage(jnp.asarray(shape.read_bytes(positions)), positions * shape.flops)
        cached = rows * (context * shape.cache_bytes + shape.state_bytes)
        attention = self._stage(cached, positions * context * shape.attention_flops)
        return shape.num_layers * self.layer_seconds + linear + attention

    def target_seconds(self, num_rows: Number, num_tokens: Number, context: Number) -> Array:
        """Returns the time of a target pass."""
        return self.pass_seconds(self.target, num_rows, num_tokens, context)

    def draft_seconds(self, num_rows: Number, num_drafts: Number, context: Number, num_behind: Number) -> Array:
        """Returns the time of the passes that catch up, a pass over two tokens, and a pass per further draft."""
        context = jnp.minimum(jnp.asarray(context, jnp.float32), self.draft_window)

        def seconds(num_tokens):
            return self.pass_seconds(self.draft, num_rows, num_tokens, context)

        num_drafts = jnp.asarray(num_drafts)
        num_reads = jnp.ceil(jnp.asarray(num_behind) / CATCH_UP_CHUNK)
        total = seconds(2) + (num_drafts - 1) * seconds(1) + num_reads * seconds(CATCH_UP_CHUNK)
        return jnp.where(num_drafts > 0, total, 0.0)

    def _stage(self, num_bytes: Array, flops: Array) -> Array:
        read, compute = num_bytes / self.bytes_per_second, flops / self.flops_per_second
        return jnp.maximum(read, compute) + (1 - self.overlap) * jnp.minimum(read, compute)


def roofline(
    target: PassShape, draft: PassShape, device: Device, *, draft_window: float | int = float("inf")
) -> RooflineModel:
    """Returns the roofline model of a pair on `device`."""
    return RooflineModel(
        target,
        draft,
        flops_per_second=device.peak_flops * device.compute_efficiency,
        bytes_per_second=device.bandwidth * device.bandwidth_efficiency,
        layer_seconds=device.layer_seconds,
        overlap=device.overlap,
        draft_window=draft_window,
    )


def fit_roofline(passes: Sequence[tuple[PassShape, Number, Number, Number, Number]]) -> tuple[float, float, float]:
    """Fits FLOP rate, bandwidth and time per layer to measured passes, without overlap.

    The fit minimizes the squared relative errors with non-negative coefficients. A rate that the passes do not
    determine is infinite, such as the bandwidth if all passes are limited by compute.

    Args:
        passes: shape, rows, tokens per row, context and seconds of each pass.

    Returns:
        ``(flops_per_second, bytes_per_second, layer_seconds)``.

    Raises:
        ValueError: if there are fewer than three passes.
    """
    if len(passes) < 3:
        raise ValueError(f"passes has {len(passes)} values: expected at least 3")
    from scipy.optimize import nnls

    rows, tokens, context, seconds = np.asarray([one[1:] for one in passes], np.float64).T
    columns = np.asarray([one[0] for one in passes], np.float64).T
    shape = PassShape(*columns)  # type: ignore[arg-type]
    num_bytes = shape.read_bytes(rows * tokens) + rows * (context * shape.cache_bytes + shape.state_bytes)
    num_flops = rows * tokens * (shape.flops + context * shape.attention_flops)
    layers = shape.num_layers
    design = np.stack([layers, num_bytes, num_flops], axis=1)
    scale = design.max(axis=0)
    relative = design / scale / seconds[:, None]
    per_layer, per_byte, per_flop = nnls(relative, np.ones(len(relative)))[0] / scale
    with np.errstate(divide="ignore"):
        return float(np.divide(1.0, per_flop)), float(np.divide(1.0, per_byte)), float(per_layer)
