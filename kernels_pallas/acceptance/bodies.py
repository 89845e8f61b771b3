"""What one program of each launch of masked acceptance computes, in jnp that both dialects of Pallas lower.

A body takes its dialect (how to read a piece of a row), its coordinates in the grid, and references: inputs, then
outputs of one element each.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.acceptance import noise
from kernels_pallas.acceptance.threshold import largest_threshold
from kernels_pallas.acceptance.verdict import kept_weight

NO_TOKEN = 2**31 - 1
"""Larger than every token."""


class PrefillChunk(NamedTuple):
    """Neighboring tokens of the vocabulary, as a dialect can read them."""

    start: jax.Array
    """Scalar int32: the first token that is read."""
    token: jax.Array
    """`[size]` int32: the tokens."""
    is_own: jax.Array
    """`[size]` bool: those that belong to this piece and to no other."""


class Dialect(Protocol):
    """How kernels of one dialect of Pallas read a row."""

    def chunk(self, index: jax.Array, size: int, vocab_size: int) -> PrefillChunk:
        """The tokens from `index * size` on, `size` of them."""
        ...

    def read(
        self,
        ref: Any,
        chunk: PrefillChunk,
        other: float,
        *,
        row: jax.Array | None = None,
        is_wanted: jax.Array | bool = True,
    ) -> jax.Array:
        """A piece of `ref [V]` or, with `row`, of `ref [rows, V]`, in float32.

        `other` outside of what is the piece's own, and everywhere unless the scalar `is_wanted`; then nothing new is
        read.
        """
        ...

    def as_float(self, bits: jax.Array) -> jax.Array:
        """The float32 scalar of these 32 bits."""
        ...


def statistics(dialect: Dialect, at, inverse_ref, logits_ref, peak_ref, mode_ref, sum_ref, weight_ref, *, chunk):
    """One chunk of one row `logits_ref [V]`: its largest logit, where, and two sums of exponentials against it."""
    chunk = dialect.chunk(at[2], chunk, logits_ref.shape[-1])
    logits = dialect.read(logits_ref, chunk, -jnp.inf)
    peak = logits.max(axis=0)
    # NaN and +inf in a row come out as NaN in its sum, which is how the row is found out.
    distance = jnp.where(logits == -jnp.inf, -jnp.inf, logits - peak)
    peak_ref[()] = peak
    mode_ref[()] = jnp.where(logits == peak, chunk.token, NO_TOKEN).min(axis=0)
    sum_ref[()] = jnp.exp(distance).sum(axis=0)
    weight_ref[()] = jnp.exp(distance * inverse_ref[()]).sum(axis=0)


def thresholds(
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
    block,
):
    """One row `logits_ref [V]`: the logit below which top-k and top-p drop a token, and the mass of what is kept."""
    vocab_size = logits_ref.shape[-1]
    # Rows past the last draft belong to no token.
    is_filtered = (is_filtered_ref[()] > 0) & (at[1] <= num_drafted_ref[()])
    inverse, min_p, peak = inverse_ref[()], min_p_ref[()], peak_ref[()]
    top_k, top_p = top_k_ref[()], top_p_ref[()]
    dtype = logits_ref.dtype.name

    def over_row(num_sums, terms):
        """Sums over the row of each of `terms(logits)` for its tokens; lanes are added once, at the end."""

        def add(step, sums):
            chunk = dialect.chunk(step, block, vocab_size)
            values = terms(dialect.read(logits_ref, chunk, -jnp.inf))
            return tuple(s + jnp.where(chunk.is_own, v, 0.0) for s, v in zip(sums, values, strict=True))

        zeros = tuple(jnp.zeros((block,), jnp.float32) for _ in range(num_sums))
        return [s.sum(axis=0) for s in lax.fori_loop(0, pl.cdiv(vocab_size, block), add, zeros)]

    def count_above(thresholds):
        return over_row(len(thresholds), lambda logits: [jnp.where(logits >= t, 1.0, 0.0) for t in thresholds])

    wants_top_k = is_filtered & (top_k > 0)
    threshold = largest_threshold(count_above, top_k.astype(jnp.float32), dtype, wants_top_k, as_float=dialect.as_float)

    def weight_above(thresholds):
        def terms(logits):
            weight = kept_weight(logits, peak, threshold, inverse, 0.0)
            return [jnp.where(logits >= t, weight, 0.0) for t in thresholds]

        return over_row(len(thresholds), terms)

    def kept_mass(is_wanted, min_p):
        def add(_, mass):
            return mass + over_row(1, lambda logits: [kept_weight(logits, peak, threshold, inverse, min_p)])[0]

        return lax.fori_loop(0, is_wanted.astype(jnp.int32), add, jnp.float32(0.0))

    wants_top_p = is_filtered & (top_p < 1)
    needed = top_p * kept_mass(wants_top_p, 0.0)
    nucleus = largest_threshold(weight_above, needed, dtype, wants_top_p, as_float=dialect.as_float)
    threshold = jnp.maximum(threshold, nucleus)
    threshold_ref[()] = threshold
    total_ref[()] = jnp.where(is_filtered, kept_mass(is_filtered, min_p), weight_ref[()])


def draw(
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
    chunk,
):
    """One chunk of one sequence: the best Gumbel score under the residual distribution and under the target's own.

    `logits_ref [G + 1, V]`; the optional `draft_ref [G, V]` holds probabilities.
    """
    *draft_refs, residual_best_ref, residual_token_ref, target_best_ref, target_token_ref, num_nan_ref = refs
    chunk = dialect.chunk(at[1], chunk, logits_ref.shape[-1])
    is_sampled, is_rejected = is_sampled_ref[()] > 0, is_rejected_ref[()] > 0
    # Greedy rows have their token already.
    logits = dialect.read(logits_ref, chunk, -jnp.inf, row=position_ref[()], is_wanted=is_sampled)
    weight = kept_weight(logits, peak_ref[()], threshold_ref[()], inverse_ref[()], min_p_ref[()])
    target = jnp.where(chunk.is_own & is_sampled, weight / total_ref[()], 0.0)
    if draft_refs:
        rejected = dialect.read(draft_refs[0], chunk, 0.0, row=slot_ref[()], is_wanted=is_sampled & is_rejected)
    else:
        rejected = jnp.where((chunk.token == rejected_token_ref[()]) & is_rejected, 1.0, 0.0)
    residual = target - rejected
    gumbel = noise.gumbel((key_ref[0], key_ref[1]), chunk.token.astype(jnp.uint32))

    for distribution, best_ref, token_ref in (
        (residual, residual_best_ref, residual_token_ref),
        (target, target_best_ref, target_token_ref),
    ):
        score = jnp.where(distribution > 0, jnp.log(jnp.where(distribution > 0, distribution, 1.0)) + gumbel, -jnp.inf)
        best = score.max(axis=0)
        best_ref[()] = best
        token_ref[()] = jnp.where(score == best, chunk.token, NO_TOKEN).min(axis=0)
    num_nan_ref[()] = (residual != residual).astype(jnp.int32).max(axis=0)
