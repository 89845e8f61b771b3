"""Masked acceptance as three launches over the logits, written once for both dialects of Pallas.

1. `row_statistics` reads all logits once: the maximum, the mode and two normalizers per block of the vocabulary.
2. `row_threshold` finds top-k, top-p and min-p thresholds; rows without filters read nothing.
3. `sample_block` reads the target's logits and the draft distribution at the first rejection of each sequence.

The partial results per block are a few kilobytes; nothing of the vocabulary's size is written. Greedy rows read nothing
after the first launch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.acceptance import kernel_bodies
from kernels_pallas.acceptance.shared import at_position, build_result, count_accepted, inverse_temperature
from kernels_pallas.acceptance.types import AcceptanceInputs, KernelAcceptance, TargetDistribution
from kernels_pallas.tuning import AcceptanceTiles


class Operand(NamedTuple):
    """An input of a launch; a program receives the part that its first `depth` grid coordinates select."""

    array: jax.Array
    depth: int


class Launch(Protocol):
    """Runs a body over a grid in one dialect."""

    def __call__(
        self,
        body: Callable[..., None],
        grid: tuple[int, ...],
        inputs: Sequence[Operand],
        dtypes: Sequence[Any],
        name: str,
    ) -> Sequence[jax.Array]:
        """Calls `body(dialect, coordinates, *input_refs, *output_refs)` for every point of the grid.

        Each output has the grid's shape, one element per program.
        """
        ...


def accept_in_kernels(launch: Launch, inputs: AcceptanceInputs, tiles: AcceptanceTiles) -> KernelAcceptance:
    """Computes `kernels_pallas.ops.masked_acceptance` with the kernels of one dialect."""
    distribution = _target_distribution(launch, inputs, tiles)
    num_accepted = count_accepted(inputs, distribution)
    token, is_sampled = _sample_token(launch, inputs, distribution, num_accepted, tiles)
    return build_result(inputs, distribution, num_accepted, token, is_sampled)


def _target_distribution(launch: Launch, inputs: AcceptanceInputs, tiles: AcceptanceTiles) -> TargetDistribution:
    """Runs launches 1 and 2."""
    batch, num_positions, vocab_size = inputs.target_logits.shape
    temperature, top_k, top_p, min_p = inputs.sampling
    inverse = inverse_temperature(temperature)
    peaks, modes, sums, weights = launch(
        functools.partial(kernel_bodies.row_statistics, size=tiles.chunk),
        (batch, num_positions, pl.cdiv(vocab_size, tiles.chunk)),
        [Operand(inverse, 1), Operand(inputs.target_logits, 2)],
        (jnp.float32, jnp.int32, jnp.float32, jnp.float32),
        "acceptance_row_statistics",
    )
    peak = peaks.max(axis=2)
    # A block of only -inf has no mass; its difference would be NaN.
    distance = jnp.where(peaks == -jnp.inf, -jnp.inf, peaks - peak[..., None])
    total = (sums * jnp.exp(distance)).sum(axis=2)
    weight = (weights * jnp.exp(distance * inverse[:, None, None])).sum(axis=2)
    mode = jnp.where(peaks == peak[..., None], modes, kernel_bodies.NO_TOKEN).min(axis=2)

    is_filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    per_row = (is_filtered.astype(jnp.int32), inputs.num_drafted, inverse, top_k, top_p, min_p)
    per_position = (peak, weight, inputs.target_logits)
    threshold, kept = launch(
        functools.partial(kernel_bodies.row_threshold, size=tiles.block),
        (batch, num_positions),
        [*(Operand(values, 1) for values in per_row), *(Operand(values, 2) for values in per_position)],
        (jnp.float32, jnp.float32),
        "acceptance_row_thresholds",
    )
    return TargetDistribution(peak, mode, peak + jnp.log(total), threshold, kept)


def _sample_token(
    launch: Launch,
    inputs: AcceptanceInputs,
    distribution: TargetDistribution,
    num_accepted: jax.Array,
    tiles: AcceptanceTiles,
) -> tuple[jax.Array, jax.Array]:
    """Runs launch 3; returns the token at position `num_accepted` and whether its distribution was valid."""
    batch, num_positions, vocab_size = inputs.target_logits.shape
    num_slots = num_positions - 1
    temperature, _, _, min_p = inputs.sampling
    is_rejected = num_accepted < inputs.num_drafted
    slot = jnp.minimum(num_accepted, max(num_slots - 1, 0))
    # With a one-hot draft distribution the residual is the target's distribution without the rejected token.
    rejected_token = at_position(inputs.draft_tokens, slot) if num_slots else num_accepted
    at_rejection = (distribution.peak, distribution.threshold, distribution.total)
    per_row = (
        (temperature > 0).astype(jnp.int32),
        is_rejected.astype(jnp.int32),
        num_accepted,
        slot,
        rejected_token,
        inverse_temperature(temperature),
        min_p,
        *(at_position(values, num_accepted) for values in at_rejection),
        inputs.residual_keys,
        inputs.target_logits,
        *([inputs.draft_probs] if inputs.draft_probs is not None and num_slots else []),
    )
    residual_best, residual_token, target_best, target_token, num_nan = launch(
        functools.partial(kernel_bodies.sample_block, size=tiles.chunk),
        (batch, pl.cdiv(vocab_size, tiles.chunk)),
        [Operand(values, 1) for values in per_row],
        (jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.int32),
        "acceptance_draw_token",
    )
    # Rounding can leave an empty residual; the target's distribution then equals the draft's within rounding.
    has_residual = residual_best.max(axis=1, keepdims=True) > -jnp.inf
    best = jnp.where(has_residual, residual_best, target_best)
    token = jnp.where(has_residual, residual_token, target_token)
    first_best = jnp.where(best == best.max(axis=1, keepdims=True), token, kernel_bodies.NO_TOKEN).min(axis=1)
    return jnp.minimum(first_best, vocab_size - 1), num_nan.max(axis=1) == 0
