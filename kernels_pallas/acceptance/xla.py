"""Masked acceptance in plain XLA, for CPUs and for GPUs where no kernel fits."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.acceptance.random_bits import gumbel_at
from kernels_pallas.acceptance.shared import build_result, count_accepted, inverse_temperature, kept_weight
from kernels_pallas.acceptance.threshold import largest_threshold
from kernels_pallas.acceptance.types import AcceptanceInputs, KernelAcceptance, KernelSampling, TargetDistribution


def masked_acceptance_xla(inputs: AcceptanceInputs) -> KernelAcceptance:
    """Computes `kernels_pallas.ops.masked_acceptance`."""
    draft_tokens, target_logits, sampling = inputs.draft_tokens, inputs.target_logits, inputs.sampling
    distribution = _target_distribution(target_logits, sampling)
    num_accepted = count_accepted(inputs, distribution)

    row = jnp.arange(target_logits.shape[0])
    token = jnp.arange(target_logits.shape[2], dtype=jnp.uint32)
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
        if inputs.draft_probs is None:
            rejected = (token == draft_tokens[row, last][:, None].astype(jnp.uint32)).astype(jnp.float32)
        else:
            rejected = inputs.draft_probs[row, last].astype(jnp.float32)
        is_rejected = (num_accepted < inputs.num_drafted)[:, None]
        residual = jnp.where(is_rejected, jnp.maximum(target - rejected, 0.0), target)
    # Rounding can leave an empty residual; the target's distribution then equals the draft's within rounding.
    is_empty = ~(residual > 0).any(axis=1, keepdims=True) & ~jnp.isnan(residual).any(axis=1, keepdims=True)
    probs = jnp.where(is_empty, target, residual)
    gumbel = gumbel_at((inputs.residual_keys[:, :1], inputs.residual_keys[:, 1:]), token[None, :])
    score = jnp.where(probs > 0, jnp.log(probs) + gumbel, -jnp.inf)
    sampled_token = jnp.argmax(score, axis=1).astype(jnp.int32)
    return build_result(inputs, distribution, num_accepted, sampled_token, ~jnp.isnan(probs).any(axis=1))


def _target_distribution(target_logits: jax.Array, sampling: KernelSampling) -> TargetDistribution:
    """Computes the thresholds and normalizers of `target_logits [B, G + 1, V]`."""
    logits = target_logits.astype(jnp.float32)
    temperature, top_k, top_p, min_p = (setting[:, None, None] for setting in sampling)
    peak = logits.max(axis=-1, keepdims=True)
    weight = jnp.exp((logits - peak) * inverse_temperature(temperature))

    def masses_of(weight):
        def masses(thresholds):
            return [jnp.where(logits >= t, weight, 0.0).sum(axis=-1, keepdims=True) for t in thresholds]

        return masses

    def find_threshold():
        dtype = target_logits.dtype.name
        wants_top_k = (top_k > 0) & (temperature > 0)
        num_wanted = jnp.broadcast_to(top_k.astype(jnp.float32), peak.shape)
        threshold = largest_threshold(masses_of(jnp.ones_like(weight)), num_wanted, dtype, wants_top_k.any())
        threshold = jnp.where(wants_top_k, threshold, -jnp.inf)
        kept = jnp.where(logits >= threshold, weight, 0.0)
        wants_top_p = (top_p < 1) & (temperature > 0)
        needed = top_p * kept.sum(axis=-1, keepdims=True)
        nucleus = largest_threshold(masses_of(kept), needed, dtype, wants_top_p.any())
        return jnp.where(wants_top_p, jnp.maximum(threshold, nucleus), threshold)

    is_filtered = ((temperature > 0) & ((top_k > 0) | (top_p < 1))).any()
    threshold = lax.cond(is_filtered, find_threshold, lambda: jnp.full_like(peak, -jnp.inf))
    total = jnp.where((logits >= threshold) & (weight >= min_p), weight, 0.0).sum(axis=-1)
    return TargetDistribution(
        peak=peak[..., 0],
        mode=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        log_normalizer=jax.nn.logsumexp(logits, axis=-1),
        threshold=threshold[..., 0],
        total=total,
    )
