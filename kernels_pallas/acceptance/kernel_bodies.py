"""What one program of each launch of masked acceptance computes, in jnp that both dialects of Pallas lower.

A body takes a dialect, its coordinates in the grid, and references: first inputs, then outputs of one element each.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.acceptance.random_bits import gumbel_at
from kernels_pallas.acceptance.shared import kept_weight
from kernels_pallas.acceptance.threshold import largest_threshold

NO_TOKEN = 2**31 - 1
"""Larger than every token."""


class VocabBlock(NamedTuple):
    """Consecutive tokens of the vocabulary that a program reads."""

    start: jax.Array
    """Scalar int32: the first token."""
    token: jax.Array
    """`[size]` int32: the tokens."""
    is_own: jax.Array
    """`[size]` bool: False for tokens past the vocabulary or of another block."""


class Dialect(Protocol):
    """How kernels of one dialect of Pallas read a row."""

    def block(self, index: jax.Array, size: int, vocab_size: int) -> VocabBlock:
        """Returns the tokens `index * size ... (index + 1) * size - 1`."""
        ...

    def read(
        self,
        ref: Any,
        block: VocabBlock,
        other: float,
        *,
        row: jax.Array | None = None,
        is_wanted: jax.Array | bool = True,
    ) -> jax.Array:
        """Returns a block of `ref [V]`, or of `ref [rows, V]` with `row`, in float32.

        The result is `other` where `block.is_own` is False, and everywhere if the scalar `is_wanted` is False; then
        nothing is read from device memory.
        """
        ...

    def as_float(self, bits: jax.Array) -> jax.Array:
        """Reinterprets a uint32 scalar as a float32."""
        ...


def row_statistics(dialect: Dialect, at, inverse_ref, logits_ref, peak_ref, mode_ref, sum_ref, weight_ref, *, size):
    """Computes the largest logit of one block of one row `logits_ref [V]`, its token, and two sums of exponentials."""
    block = dialect.block(at[2], size, logits_ref.shape[-1])
    logits = dialect.read(logits_ref, block, -jnp.inf)
    peak = logits.max(axis=0)
    # NaN and +inf in a row give a sum of NaN, by which the row is recognized as invalid.
    distance = jnp.where(logits == -jnp.inf, -jnp.inf, logits - peak)
    peak_ref[()] = peak
    mode_ref[()] = jnp.where(logits == peak, block.token, NO_TOKEN).min(axis=0)
    sum_ref[()] = jnp.exp(distance).sum(axis=0)
    weight_ref[()] = jnp.exp(distance * inverse_ref[()]).sum(axis=0)


def row_threshold(
    dialect: Dialect,
    at,
    is_filtered_ref,
    num_drafted_ref,
    inverse_ref,
    top_k_ref,
    top_p_ref,
    min_p_ref,
    peak_ref,
    weight_ref,
    logits_ref,
    threshold_ref,
    total_ref,
    *,
    size,
):
    """Finds the logit below which top-k and top-p drop tokens of one row `logits_ref [V]`, and the kept mass."""
    vocab_size = logits_ref.shape[-1]
    # Positions past the last draft are not used.
    is_filtered = (is_filtered_ref[()] > 0) & (at[1] <= num_drafted_ref[()])
    inverse, min_p, peak = inverse_ref[()], min_p_ref[()], peak_ref[()]
    top_k, top_p = top_k_ref[()], top_p_ref[()]
    dtype = logits_ref.dtype.name

    def sum_over_row(num_sums, terms):
        """Sums each of `terms(logits)` over the row; lanes are added once, at the end."""

        def add(step, sums):
            block = dialect.block(step, size, vocab_size)
            values = terms(dialect.read(logits_ref, block, -jnp.inf))
            return tuple(s + jnp.where(block.is_own, v, 0.0) for s, v in zip(sums, values, strict=True))

        zeros = tuple(jnp.zeros((size,), jnp.float32) for _ in range(num_sums))
        return [s.sum(axis=0) for s in lax.fori_loop(0, pl.cdiv(vocab_size, size), add, zeros)]

    def count_above(thresholds):
        return sum_over_row(len(thresholds), lambda logits: [jnp.where(logits >= t, 1.0, 0.0) for t in thresholds])

    wants_top_k = is_filtered & (top_k > 0)
    threshold = largest_threshold(count_above, top_k.astype(jnp.float32), dtype, wants_top_k, as_float=dialect.as_float)

    def weight_above(thresholds):
        def terms(logits):
            weight = kept_weight(logits, peak, threshold, inverse, 0.0)
            return [jnp.where(logits >= t, weight, 0.0) for t in thresholds]

        return sum_over_row(len(thresholds), terms)

    def kept_mass(is_wanted, min_p):
        def add(_, mass):
            return mass + sum_over_row(1, lambda logits: [kept_weight(logits, peak, threshold, inverse, min_p)])[0]

        return lax.fori_loop(0, is_wanted.astype(jnp.int32), add, jnp.float32(0.0))

    wants_top_p = is_filtered & (top_p < 1)
    needed = top_p * kept_mass(wants_top_p, 0.0)
    nucleus = largest_threshold(weight_above, needed, dtype, wants_top_p, as_float=dialect.as_float)
    threshold = jnp.maximum(threshold, nucleus)
    threshold_ref[()] = threshold
    total_ref[()] = jnp.where(is_filtered, kept_mass(is_filtered, min_p), weight_ref[()])


def sample_block(
    dialect: Dialect,
    at,
    is_sampled_ref,
    is_rejected_ref,
    position_ref,
    slot_ref,
    rejected_token_ref,
    inverse_ref,
    min_p_ref,
    peak_ref,
    threshold_ref,
    total_ref,
    key_ref,
    logits_ref,
    *refs,
    size,
):
    """Finds the best Gumbel score in one block of one sequence, under the residual and under the target distribution.

    `logits_ref [G + 1, V]`; the optional `draft_ref [G, V]` holds probabilities.
    """
    *draft_refs, residual_best_ref, residual_token_ref, target_best_ref, target_token_ref, num_nan_ref = refs
    block = dialect.block(at[1], size, logits_ref.shape[-1])
    is_sampled, is_rejected = is_sampled_ref[()] > 0, is_rejected_ref[()] > 0
    # Greedy rows use the mode and read nothing here.
    logits = dialect.read(logits_ref, block, -jnp.inf, row=position_ref[()], is_wanted=is_sampled)
    weight = kept_weight(logits, peak_ref[()], threshold_ref[()], inverse_ref[()], min_p_ref[()])
    target = jnp.where(block.is_own & is_sampled, weight / total_ref[()], 0.0)
    if draft_refs:
        rejected = dialect.read(draft_refs[0], block, 0.0, row=slot_ref[()], is_wanted=is_sampled & is_rejected)
    else:
        rejected = jnp.where((block.token == rejected_token_ref[()]) & is_rejected, 1.0, 0.0)
    residual = target - rejected
    gumbel = gumbel_at((key_ref[0], key_ref[1]), block.token.astype(jnp.uint32))

    for distribution, best_ref, token_ref in (
        (residual, residual_best_ref, residual_token_ref),
        (target, target_best_ref, target_token_ref),
    ):
        score = jnp.where(distribution > 0, jnp.log(jnp.where(distribution > 0, distribution, 1.0)) + gumbel, -jnp.inf)
        best = score.max(axis=0)
        best_ref[()] = best
        token_ref[()] = jnp.where(score == best, block.token, NO_TOKEN).min(axis=0)
    num_nan_ref[()] = (residual != residual).astype(jnp.int32).max(axis=0)
