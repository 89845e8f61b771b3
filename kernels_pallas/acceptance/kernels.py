"""Masked acceptance as three launches that read the logits where they lie, written once for both dialects of Pallas.

1. `row_statistics`: one pass over all rows of logits; maximum, mode and both normalizers per vocabulary chunk. 2.
`row_thresholds`: top-k, top-p and min-p of the rows that have any; the others read nothing. 3. `draw_token`: per
sequence, one pass over *one* pair of rows, target and draft, at the first rejection.

Partial results per chunk are a few kilobytes; nothing of the vocabulary's size is written. Greedy rows need the first
launch alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.acceptance import bodies
from kernels_pallas.acceptance.verdict import (
    KernelAcceptance,
    KernelSampling,
    TargetDistribution,
    at_position,
    conclude,
    count_accepted,
    inverse_temperature,
)
from kernels_pallas.tuning import AcceptanceTiles


class Operand(NamedTuple):
    """An input of a launch, of which a program sees the part that its first `depth` grid coordinates pick."""

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

        An output has the grid's shape and one element per program.
        """
        ...


def accept_in_kernels(
    launch: Launch,
    draft_tokens: jax.Array,
    num_drafted: jax.Array,
    target_logits: jax.Array,
    draft_probs: jax.Array | None,
    accept_keys: jax.Array,
    residual_keys: jax.Array,
    sampling: KernelSampling,
    *,
    tiles: AcceptanceTiles,
) -> KernelAcceptance:
    """The op of `kernels_pallas.ops.masked_acceptance`, whose arguments these are, checked and in range.

    Args:
        launch: Of the dialect.
        draft_tokens: `[B, G]` int32.
        num_drafted: `[B]` int32.
        target_logits: `[B, G + 1, V]`.
        draft_probs: `[B, G, V]`, or None for a one-hot distribution.
        accept_keys: `[B, 2]` uint32.
        residual_keys: `[B, 2]` uint32.
        sampling: Warping of the target's distribution.
        tiles: Chunk sizes.

    Returns:
        The result.
    """
    distribution = _target_distribution(launch, target_logits, num_drafted, sampling, tiles)
    num_accepted = count_accepted(
        draft_tokens, num_drafted, target_logits, draft_probs, accept_keys, distribution, sampling
    )
    token, is_drawn = _draw_token(
        launch,
        draft_tokens,
        num_drafted,
        target_logits,
        draft_probs,
        residual_keys,
        distribution,
        sampling,
        num_accepted,
        tiles,
    )
    return conclude(draft_tokens, target_logits, distribution, sampling, num_accepted, token, is_drawn)


def _target_distribution(launch, target_logits, num_drafted, sampling, tiles) -> TargetDistribution:
    """Launches 1 and 2."""
    batch, num_positions, vocab_size = target_logits.shape
    inverse = inverse_temperature(sampling.temperature)
    peaks, modes, sums, weights = launch(
        functools.partial(bodies.statistics, chunk=tiles.chunk),
        (batch, num_positions, pl.cdiv(vocab_size, tiles.chunk)),
        [Operand(inverse, 1), Operand(target_logits, 2)],
        (jnp.float32, jnp.int32, jnp.float32, jnp.float32),
        "acceptance_row_statistics",
    )
    peak = peaks.max(axis=2)
    # A chunk of nothing but -inf has no differences; it holds no mass either.
    distance = jnp.where(peaks == -jnp.inf, -jnp.inf, peaks - peak[..., None])
    total = (sums * jnp.exp(distance)).sum(axis=2)
    weight = (weights * jnp.exp(distance * inverse[:, None, None])).sum(axis=2)
    mode = jnp.where(peaks == peak[..., None], modes, bodies.NO_TOKEN).min(axis=2)

    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    is_filtered = (sampling.temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    of_row = (is_filtered.astype(jnp.int32), num_drafted, inverse, top_k, top_p, min_p)
    threshold, kept = launch(
        functools.partial(bodies.thresholds, block=tiles.block),
        (batch, num_positions),
        [*(Operand(values, 1) for values in of_row), Operand(peak, 2), Operand(weight, 2), Operand(target_logits, 2)],
        (jnp.float32, jnp.float32),
        "acceptance_row_thresholds",
    )
    return TargetDistribution(peak, mode, peak + jnp.log(total), threshold, kept)


def _draw_token(
    launch,
    draft_tokens,
    num_drafted,
    target_logits,
    draft_probs,
    residual_keys,
    distribution,
    sampling,
    num_accepted,
    tiles,
) -> tuple[jax.Array, jax.Array]:
    """Launch 3: the token at `num_accepted` and whether there was a distribution to draw it from."""
    batch, num_positions, vocab_size = target_logits.shape
    num_slots = num_positions - 1
    is_rejected = num_accepted < num_drafted
    slot = jnp.minimum(num_accepted, max(num_slots - 1, 0))
    # With a one-hot draft distribution the residual is the target's distribution without the rejected token.
    rejected_token = at_position(draft_tokens, slot) if num_slots else num_accepted
    of_row = (
        (sampling.temperature > 0).astype(jnp.int32),
        is_rejected.astype(jnp.int32),
        num_accepted,
        slot,
        rejected_token,
        inverse_temperature(sampling.temperature),
        sampling.min_p,
        *(
            at_position(values, num_accepted)
            for values in (distribution.peak, distribution.threshold, distribution.total)
        ),
        residual_keys,
        target_logits,
        *([draft_probs] if draft_probs is not None and num_slots else []),
    )
    residual_best, residual_token, target_best, target_token, num_nan = launch(
        functools.partial(bodies.draw, chunk=tiles.chunk),
        (batch, pl.cdiv(vocab_size, tiles.chunk)),
        [Operand(values, 1) for values in of_row],
        (jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.int32),
        "acceptance_draw_token",
    )
    # Rounding can leave nothing of a residual; the target's own distribution is then within rounding of the draft's.
    has_residual = residual_best.max(axis=1, keepdims=True) > -jnp.inf
    best = jnp.where(has_residual, residual_best, target_best)
    token = jnp.where(has_residual, residual_token, target_token)
    first_best = jnp.where(best == best.max(axis=1, keepdims=True), token, bodies.NO_TOKEN).min(axis=1)
    return jnp.minimum(first_best, vocab_size - 1), num_nan.max(axis=1) == 0
