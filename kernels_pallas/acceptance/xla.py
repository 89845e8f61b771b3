"""Masked acceptance in plain XLA: what runs on a CPU, and on a GPU where no kernel fits."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.acceptance import noise
from kernels_pallas.acceptance.threshold import largest_threshold
from kernels_pallas.acceptance.verdict import (
    KernelAcceptance,
    KernelSampling,
    TargetDistribution,
    conclude,
    count_accepted,
    inverse_temperature,
    kept_weight,
)


def masked_acceptance_xla(
    draft_tokens: jax.Array,
    num_drafted: jax.Array,
    target_logits: jax.Array,
    draft_probs: jax.Array | None,
    accept_keys: jax.Array,
    residual_keys: jax.Array,
    sampling: KernelSampling,
) -> KernelAcceptance:
    """The op of `kernels_pallas.ops.masked_acceptance`, whose arguments these are, checked and in range."""
    distribution = _target_distribution(target_logits, sampling)
    num_accepted = count_accepted(
        draft_tokens, num_drafted, target_logits, draft_probs, accept_keys, distribution, sampling
    )

    row = jnp.arange(target_logits.shape[0])
    vocab_size = target_logits.shape[2]
    token = jnp.arange(vocab_size, dtype=jnp.uint32)
    weight = kept_weight(
        target_logits[row, num_accepted].astype(jnp.float32),
        distribution.peak[row, num_accepted][:, None],
        distribution.threshold[row, num_accepted][:, None],
        inverse_temperature(sampling.temperature)[:, None],
        sampling.min_p[:, None],
    )
    target = weight / distribution.total[row, num_accepted][:, None]
    residual = target
    if draft_tokens.shape[1]:
        last = jnp.minimum(num_accepted, draft_tokens.shape[1] - 1)
        if draft_probs is None:
            rejected = (token == draft_tokens[row, last][:, None].astype(jnp.uint32)).astype(jnp.float32)
        else:
            rejected = draft_probs[row, last].astype(jnp.float32)
        residual = jnp.where((num_accepted < num_drafted)[:, None], jnp.maximum(target - rejected, 0.0), target)
    # Rounding can leave nothing of a residual; the target's own distribution is then within rounding of the draft's.
    is_empty = ~(residual > 0).any(axis=1, keepdims=True) & ~jnp.isnan(residual).any(axis=1, keepdims=True)
    probs = jnp.where(is_empty, target, residual)
    gumbel = noise.gumbel((residual_keys[:, :1], residual_keys[:, 1:]), token[None, :])
    score = jnp.where(probs > 0, jnp.log(probs) + gumbel, -jnp.inf)
    return conclude(
        draft_tokens,
        target_logits,
        distribution,
        sampling,
        num_accepted,
        jnp.argmax(score, axis=1).astype(jnp.int32),
        ~jnp.isnan(probs).any(axis=1),
    )


def _target_distribution(target_logits: jax.Array, sampling: KernelSampling) -> TargetDistribution:
    """Finds the thresholds and normalizers of `[B, G + 1]` distributions from their logits `[B, G + 1, V]`."""
    logits = target_logits.astype(jnp.float32)
    temperature, top_k, top_p, min_p = (setting[:, None, None] for setting in sampling)
    peak = logits.max(axis=-1, keepdims=True)
    weight = jnp.exp((logits - peak) * inverse_temperature(temperature))

    def masses_of(weight):
        def masses(thresholds):
            return [jnp.where(logits >= t, weight, 0.0).sum(axis=-1, keepdims=True) for t in thresholds]

        return masses

    def filtered():
        wants_top_k = (top_k > 0) & (temperature > 0)
        threshold = largest_threshold(
            masses_of(jnp.ones_like(weight)),
            jnp.broadcast_to(top_k.astype(jnp.float32), peak.shape),
            target_logits.dtype.name,
            wants_top_k.any(),
        )
        threshold = jnp.where(wants_top_k, threshold, -jnp.inf)
        kept = jnp.where(logits >= threshold, weight, 0.0)
        wants_top_p = (top_p < 1) & (temperature > 0)
        nucleus = largest_threshold(
            masses_of(kept), top_p * kept.sum(axis=-1, keepdims=True), target_logits.dtype.name, wants_top_p.any()
        )
        return jnp.where(wants_top_p, jnp.maximum(threshold, nucleus), threshold)

    is_filtered = ((temperature > 0) & ((top_k > 0) | (top_p < 1))).any()
    threshold = lax.cond(is_filtered, filtered, lambda: jnp.full_like(peak, -jnp.inf))
    total = jnp.where((logits >= threshold) & (weight >= min_p), weight, 0.0).sum(axis=-1)
    return TargetDistribution(
        peak=peak[..., 0],
        mode=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        log_normalizer=jax.nn.logsumexp(logits, axis=-1),
        threshold=threshold[..., 0],
        total=total,
    )
