"""Masked acceptance in Pallas' Triton dialect: three launches, each reading the logits where they lie.

1. `row_statistics`: one pass over all rows of logits; maximum, mode and both normalisers per vocabulary
chunk. 2. `row_thresholds`: top-k, top-p and min-p of the rows that have any; the others read nothing. 3.
`draw_token`: per sequence, one pass over *one* pair of rows, target and draft, at the first rejection.

Partial results per chunk are a few kilobytes; nothing of the vocabulary's size is written. Greedy rows need
the first launch alone. jax has deprecated this dialect since 0.11.0; the module goes when jax drops it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.acceptance import noise
from kernels_pallas.acceptance.threshold import largest_threshold
from kernels_pallas.acceptance.verdict import (
    Acceptance,
    Sampling,
    TargetLaw,
    at_position,
    conclude,
    count_accepted,
    inverse_temperature,
    kept_weight,
)
from kernels_pallas.targets import silence_triton_deprecation
from kernels_pallas.tuning import AcceptanceTiles

_NO_TOKEN = 2**31 - 1


def masked_acceptance_triton(
    draft_tokens: jax.Array,
    num_drafted: jax.Array,
    target_logits: jax.Array,
    draft_probs: jax.Array | None,
    accept_keys: jax.Array,
    residual_keys: jax.Array,
    sampling: Sampling,
    *,
    tiles: AcceptanceTiles,
    interpret: bool = False,
) -> Acceptance:
    """The op of `kernels_pallas.ops.masked_acceptance`, whose arguments these are, checked and in range.

    Args:
        draft_tokens: `[B, G]` int32.
        num_drafted: `[B]` int32.
        target_logits: `[B, G + 1, V]`.
        draft_probs: `[B, G, V]`, or None for a one-hot law.
        accept_keys: `[B, 2]` uint32.
        residual_keys: `[B, 2]` uint32.
        sampling: Warping of the target's law.
        tiles: Chunk sizes and launch parameters.
        interpret: Run in jax's interpreter.

    Returns:
        The verdict.
    """
    silence_triton_deprecation()
    options = {
        "compiler_params": plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        "interpret": interpret,
    }
    law = _target_law(target_logits, num_drafted, sampling, tiles, options)
    num_accepted = count_accepted(draft_tokens, num_drafted, target_logits, draft_probs, accept_keys, law, sampling)
    token, is_drawn = _draw_token(
        draft_tokens,
        num_drafted,
        target_logits,
        draft_probs,
        residual_keys,
        law,
        sampling,
        num_accepted,
        tiles,
        options,
    )
    return conclude(draft_tokens, target_logits, law, sampling, num_accepted, token, is_drawn)


def _target_law(target_logits, num_drafted, sampling, tiles, options) -> TargetLaw:
    """Launches 1 and 2."""
    batch, num_positions, vocab_size = target_logits.shape
    num_chunks = pl.cdiv(vocab_size, tiles.chunk)
    inverse = inverse_temperature(sampling.temperature)
    position_row = pl.BlockSpec((None, None, vocab_size), lambda b, g, *_: (b, g, 0))
    of_row = pl.BlockSpec((None,), lambda b, *_: (b,))
    of_chunk = pl.BlockSpec((None, None, None), lambda b, g, c: (b, g, c))
    partial = (batch, num_positions, num_chunks)
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    peaks, modes, sums, weights = pl.pallas_call(
        functools.partial(_statistics_kernel, chunk=tiles.chunk),
        grid=partial,
        in_specs=[of_row, position_row],
        out_specs=[of_chunk] * 4,
        out_shape=[jax.ShapeDtypeStruct(partial, dtype) for dtype in dtypes],
        name="acceptance_row_statistics",
        **options,
    )(inverse, target_logits)
    peak = peaks.max(axis=2)
    # A chunk of nothing but -inf has no differences; it holds no mass either.
    distance = jnp.where(peaks == -jnp.inf, -jnp.inf, peaks - peak[..., None])
    total = (sums * jnp.exp(distance)).sum(axis=2)
    weight = (weights * jnp.exp(distance * inverse[:, None, None])).sum(axis=2)
    mode = jnp.where(peaks == peak[..., None], modes, _NO_TOKEN).min(axis=2)

    top_k, top_p = sampling.top_k, sampling.top_p
    is_filtered = (sampling.temperature > 0) & ((top_k > 0) | (top_p < 1) | (sampling.min_p > 0))
    of_position = pl.BlockSpec((None, None), lambda b, g: (b, g))
    threshold, kept = pl.pallas_call(
        functools.partial(_threshold_kernel, block=tiles.block),
        grid=(batch, num_positions),
        in_specs=[*[of_row] * 6, of_position, of_position, position_row],
        out_specs=[of_position] * 2,
        out_shape=[jax.ShapeDtypeStruct((batch, num_positions), jnp.float32)] * 2,
        name="acceptance_row_thresholds",
        **options,
    )(is_filtered.astype(jnp.int32), num_drafted, inverse, top_k, top_p, sampling.min_p, peak, weight, target_logits)
    return TargetLaw(peak, mode, peak + jnp.log(total), threshold, kept)


def _draw_token(
    draft_tokens, num_drafted, target_logits, draft_probs, residual_keys, law, sampling, num_accepted, tiles, options
) -> tuple[jax.Array, jax.Array]:
    """Launch 3: the token at `num_accepted` and whether there was a law to draw it from."""
    batch, num_positions, vocab_size = target_logits.shape
    num_slots = num_positions - 1
    num_chunks = pl.cdiv(vocab_size, tiles.chunk)
    is_rejected = num_accepted < num_drafted
    slot = jnp.minimum(num_accepted, max(num_slots - 1, 0))
    # With a one-hot draft law the residual is the target's law without the rejected token.
    rejected_token = at_position(draft_tokens, slot) if num_slots else num_accepted
    of_row = pl.BlockSpec((None,), lambda b, c: (b,))
    laws = [target_logits]
    law_specs = [pl.BlockSpec((None, num_positions, vocab_size), lambda b, c: (b, 0, 0))]
    if draft_probs is not None and num_slots:
        laws.append(draft_probs)
        law_specs.append(pl.BlockSpec((None, num_slots, vocab_size), lambda b, c: (b, 0, 0)))
    scalars = (
        (sampling.temperature > 0).astype(jnp.int32),
        is_rejected.astype(jnp.int32),
        num_accepted,
        slot,
        rejected_token,
        inverse_temperature(sampling.temperature),
        sampling.min_p,
        *(at_position(values, num_accepted) for values in (law.peak, law.threshold, law.total)),
    )
    of_chunk = pl.BlockSpec((None, None), lambda b, c: (b, c))
    outputs = (jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)
    residual_best, residual_token, target_best, target_token, num_nan = pl.pallas_call(
        functools.partial(_draw_kernel, chunk=tiles.chunk),
        grid=(batch, num_chunks),
        in_specs=[*[of_row for _ in scalars], pl.BlockSpec((None, 2), lambda b, c: (b, 0)), *law_specs],
        out_specs=[of_chunk for _ in outputs],
        out_shape=[jax.ShapeDtypeStruct((batch, num_chunks), dtype) for dtype in outputs],
        name="acceptance_draw_token",
        **options,
    )(*scalars, residual_keys, *laws)
    # Rounding can leave nothing of a residual; the target's own law is then within rounding of the draft's.
    has_residual = residual_best.max(axis=1, keepdims=True) > -jnp.inf
    best = jnp.where(has_residual, residual_best, target_best)
    token = jnp.where(has_residual, residual_token, target_token)
    first_best = jnp.where(best == best.max(axis=1, keepdims=True), token, _NO_TOKEN).min(axis=1)
    return jnp.minimum(first_best, vocab_size - 1), num_nan.max(axis=1) == 0


def _statistics_kernel(inverse_ref, logits_ref, peak_ref, mode_ref, sum_ref, weight_ref, *, chunk):
    """One chunk of one row `logits_ref [V]`: its largest logit, where, and two sums of exponentials against it."""
    token = pl.program_id(2) * chunk + jnp.arange(chunk)
    is_inside = token < logits_ref.shape[0]
    logits = plgpu.load(logits_ref.at[pl.ds(pl.program_id(2) * chunk, chunk)], mask=is_inside, other=-jnp.inf)
    logits = logits.astype(jnp.float32)
    peak = logits.max(axis=0)
    # NaN and +inf in a row come out as NaN in its sum, which is how the row is found out.
    distance = jnp.where(logits == -jnp.inf, -jnp.inf, logits - peak)
    peak_ref[()] = peak
    mode_ref[()] = jnp.where(logits == peak, token, _NO_TOKEN).min(axis=0)
    sum_ref[()] = jnp.exp(distance).sum(axis=0)
    weight_ref[()] = jnp.exp(distance * inverse_ref[()]).sum(axis=0)


def _threshold_kernel(
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
    vocab_size = logits_ref.shape[0]
    # Rows past the last draft belong to no token.
    is_filtered = (is_filtered_ref[()] > 0) & (pl.program_id(1) <= num_drafted_ref[()])
    inverse, min_p, peak = inverse_ref[()], min_p_ref[()], peak_ref[()]
    top_k, top_p = top_k_ref[()], top_p_ref[()]
    dtype = logits_ref.dtype.name

    def over_row(num_sums, terms):
        """Sums over the row of each of `terms(logits, is_inside)`; lanes are added once, at the end."""

        def add(step, sums):
            start = step * block
            is_inside = start + jnp.arange(block) < vocab_size
            logits = plgpu.load(logits_ref.at[pl.ds(start, block)], mask=is_inside, other=-jnp.inf)
            return tuple(s + t for s, t in zip(sums, terms(logits.astype(jnp.float32), is_inside), strict=True))

        zeros = tuple(jnp.zeros((block,), jnp.float32) for _ in range(num_sums))
        return [s.sum(axis=0) for s in lax.fori_loop(0, pl.cdiv(vocab_size, block), add, zeros)]

    def count_above(thresholds):
        return over_row(
            len(thresholds),
            lambda logits, is_inside: [jnp.where(is_inside & (logits >= t), 1.0, 0.0) for t in thresholds],
        )

    wants_top_k = is_filtered & (top_k > 0)
    threshold = largest_threshold(count_above, top_k.astype(jnp.float32), dtype, wants_top_k)

    def weight_above(thresholds):
        def terms(logits, is_inside):
            weight = kept_weight(logits, peak, threshold, inverse, 0.0)
            return [jnp.where(is_inside & (logits >= t), weight, 0.0) for t in thresholds]

        return over_row(len(thresholds), terms)

    wants_top_p = is_filtered & (top_p < 1)

    def kept_mass(min_p):
        def terms(logits, is_inside):
            return [jnp.where(is_inside, kept_weight(logits, peak, threshold, inverse, min_p), 0.0)]

        return terms

    mass = lax.fori_loop(
        0, wants_top_p.astype(jnp.int32), lambda _, mass: mass + over_row(1, kept_mass(0.0))[0], jnp.float32(0.0)
    )
    nucleus = largest_threshold(weight_above, top_p * mass, dtype, wants_top_p)
    threshold = jnp.maximum(threshold, nucleus)
    total = lax.fori_loop(
        0, is_filtered.astype(jnp.int32), lambda _, total: total + over_row(1, kept_mass(min_p))[0], jnp.float32(0.0)
    )
    threshold_ref[()] = threshold
    total_ref[()] = jnp.where(is_filtered, total, weight_ref[()])


def _draw_kernel(
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
    """One chunk of one sequence: the best Gumbel score under the residual law and under the target's own.

    `logits_ref [G + 1, V]`; the optional `draft_ref [G, V]` holds probabilities.
    """
    *draft_refs, residual_best_ref, residual_token_ref, target_best_ref, target_token_ref, num_nan_ref = refs
    start = pl.program_id(1) * chunk
    token = start + jnp.arange(chunk)
    is_sampled, is_rejected = is_sampled_ref[()] > 0, is_rejected_ref[()] > 0
    # Greedy rows have their token already: they load nothing.
    is_read = (token < logits_ref.shape[1]) & is_sampled
    logits = plgpu.load(logits_ref.at[position_ref[()], pl.ds(start, chunk)], mask=is_read, other=-jnp.inf)
    weight = kept_weight(logits.astype(jnp.float32), peak_ref[()], threshold_ref[()], inverse_ref[()], min_p_ref[()])
    target = jnp.where(is_read, weight / total_ref[()], 0.0)
    if draft_refs:
        mask = is_read & is_rejected
        rejected = plgpu.load(draft_refs[0].at[slot_ref[()], pl.ds(start, chunk)], mask=mask, other=0.0)
        rejected = rejected.astype(jnp.float32)
    else:
        rejected = jnp.where((token == rejected_token_ref[()]) & is_rejected, 1.0, 0.0)
    residual = target - rejected
    gumbel = noise.gumbel((key_ref[0], key_ref[1]), token.astype(jnp.uint32))

    for law, best_ref, token_ref in (
        (residual, residual_best_ref, residual_token_ref),
        (target, target_best_ref, target_token_ref),
    ):
        score = jnp.where(law > 0, jnp.log(jnp.where(law > 0, law, 1.0)) + gumbel, -jnp.inf)
        best = score.max(axis=0)
        best_ref[()] = best
        token_ref[()] = jnp.where(score == best, token, _NO_TOKEN).min(axis=0)
    num_nan_ref[()] = (residual != residual).astype(jnp.int32).max(axis=0)
