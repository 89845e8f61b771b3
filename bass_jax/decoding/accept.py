"""Applies an acceptance rule to logits and drafts, in jnp or as a fused kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.acceptance import GREEDY, TOKEN, AcceptanceRule, RuleKeys
from bass_jax.acceptance.base import AcceptanceResult, check_acceptance
from bass_jax.config import SpecConfig
from bass_jax.decoding.positions import join_tokens
from bass_jax.decoding.state import FinishReason, TokenLogprobs
from bass_jax.drafters import Proposal
from bass_jax.sampling import SamplingArrays, TokenDistribution, token_distribution
from bass_jax.sampling.distribution import log_normalizer
from bass_jax.typing import Array, Float
from kernels_pallas import KernelSampling, ops
from kernels_pallas.acceptance.random_bits import gives_bits_of
from kernels_pallas.targets import current_target


class StepTokens(NamedTuple):
    """The tokens that each row can emit, before stop tokens and limits are applied."""

    tokens: Array  # [B, T] int32, accepted drafts and the token after them, then arbitrary values
    num_accepted: Array  # [B] int32
    num_valid: Array  # [B] int32, leading tokens that come from valid distributions; T if all are valid
    failure: Array  # [B] int32, `FinishReason` of a row that would emit more than `num_valid` tokens
    logprobs: Array  # [B, T] float32, of `tokens` under the target's raw distribution
    token_logprobs: TokenLogprobs | None


class TargetLogits(NamedTuple):
    """The target's logits before and after the logits processors."""

    raw: Array  # [B, T, V] float32
    processed: Array  # [B, T, V] float32; the same object as `raw` without processors

    @property
    def is_processed(self) -> bool:
        """Whether there are processors; static."""
        return self.processed is not self.raw


def accept(
    rule: AcceptanceRule,
    proposal: Proposal,
    logits: TargetLogits,
    sampling_arrays: SamplingArrays,
    keys: RuleKeys,
    spec: SpecConfig,
) -> StepTokens:
    """Applies `rule` to the drafts.

    Args:
        rule: the acceptance rule.
        proposal: drafts ``[B, T - 1]``; T is 1 in a regular step.
        logits: of the target.
        sampling_arrays: per row.
        keys: of this step; `record_drafts` draws from them again, to record the same numbers.
        spec: with ``acceptance_kernel="pallas"`` the greedy and the token rule run on a GPU as
            `kernels_pallas.ops.masked_acceptance`, which allocates no array of the size of the vocabulary. The tokens
            are the same.
    """
    # XLA removes what the kernel and the greedy rule do not use.
    distribution = token_distribution(logits.processed, sampling_arrays)
    if rule is GREEDY:
        distribution = _greedy_distribution(distribution)
    if spec.acceptance_kernel == "pallas" and rule in (GREEDY, TOKEN) and _has_kernel(keys):
        result = _by_kernel(rule, proposal, logits.processed, sampling_arrays, keys)
        tokens = join_tokens(proposal.tokens, result.num_accepted, result.next_token)
        # With processors or alternatives, the log-probabilities of the kernel are not those that are reported.
        if not logits.is_processed and spec.num_logprobs is None:
            # The kernel accepts no draft whose distribution is invalid, so only the token after them can be invalid.
            num_valid = jnp.where(result.is_valid, logits.raw.shape[1], result.num_accepted)
            failure = jnp.full_like(num_valid, FinishReason.NOT_FINITE)
            return StepTokens(tokens, result.num_accepted, num_valid, failure, result.logprobs, None)
    else:
        result = rule.accept(proposal.tokens, proposal.num_drafted, proposal.probs, distribution, keys)
        result = check_acceptance(rule, result, AcceptanceResult, proposal.num_drafted, logits.raw.shape[-1])
        tokens = join_tokens(proposal.tokens, result.num_accepted, result.next_token)
    return with_logprobs(tokens, result.num_accepted, logits, distribution, spec.num_logprobs)


def with_logprobs(
    tokens: Array, num_accepted: Array, logits: TargetLogits, distribution: TokenDistribution, num_logprobs: int | None
) -> StepTokens:
    """Adds log-probabilities to `tokens` ``[B, T]``, and finds out which come from valid distributions."""
    normalizer = log_normalizer(logits.raw)
    is_finite = is_valid = jnp.isfinite(normalizer)
    if logits.is_processed:
        is_valid &= jnp.isfinite(log_normalizer(logits.processed))
    num_positions = tokens.shape[1]
    num_valid = jnp.where(is_valid, num_positions, jnp.arange(num_positions)).min(axis=1)
    is_banned = is_finite & (logits.processed.max(axis=-1) == -jnp.inf)
    first = jnp.minimum(num_valid, num_positions - 1)[:, None]
    failure = jnp.where(
        jnp.take_along_axis(is_banned, first, axis=1)[:, 0], FinishReason.NO_TOKEN, FinishReason.NOT_FINITE
    )
    logprobs = jnp.take_along_axis(logits.raw, tokens[..., None], axis=2)[..., 0] - normalizer
    token_logprobs = None
    if num_logprobs is not None:
        raw, warped = logits.raw - normalizer[..., None], jnp.log(distribution.probs)
        (raw_top, raw_ids), (warped_top, warped_ids) = (jax.lax.top_k(values, num_logprobs) for values in (raw, warped))
        chosen = jnp.take_along_axis(warped, tokens[..., None], axis=2)[..., 0]
        token_logprobs = TokenLogprobs(chosen, raw_ids, raw_top, warped_ids, warped_top)
    return StepTokens(tokens, num_accepted, num_valid, failure, logprobs, token_logprobs)


def require_greedy(step_tokens: StepTokens, sampling_arrays: SamplingArrays) -> StepTokens:
    """Ends rows whose temperature is not 0, for a rule that decodes greedily."""
    is_greedy = jnp.asarray(sampling_arrays.temperature) == 0
    return step_tokens._replace(
        num_valid=jnp.where(is_greedy, step_tokens.num_valid, 0),
        failure=jnp.where(is_greedy, step_tokens.failure, FinishReason.NOT_GREEDY),
    )


def _greedy_distribution(distribution: TokenDistribution) -> TokenDistribution:
    """Returns the one-hot distribution of the greedy rule. XLA removes it where only the argmax is used."""
    return distribution._replace(
        probs=jax.nn.one_hot(distribution.argmax, distribution.probs.shape[-1], dtype=jnp.float32)
    )


def _by_kernel(
    rule, proposal: Proposal, logits: Float[Array, "B T V"], sampling_arrays: SamplingArrays, keys: RuleKeys
):
    *settings, _ = sampling_arrays
    sampling = KernelSampling(*map(jnp.asarray, settings))
    if rule is GREEDY:
        sampling = sampling._replace(temperature=jnp.zeros_like(sampling.temperature))
    accept_key, residual_key = (jax.random.key_data(key) for key in (keys.accept, keys.residual))
    return ops.masked_acceptance(
        proposal.tokens, proposal.num_drafted, logits, proposal.probs, accept_key, residual_key, sampling
    )


def _has_kernel(keys: RuleKeys) -> bool:
    """Returns whether the step is traced for a GPU, with keys of the generator that the kernel implements."""
    return current_target().platform == "gpu" and gives_bits_of(keys.residual)
