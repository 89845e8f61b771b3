"""Turns logits and drafts into the tokens of a step: by a rule in jnp, or by the fused kernel where there is one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.acceptance import GREEDY, TOKEN, AcceptanceRule, RuleKeys
from bass_jax.acceptance.base import AcceptanceResult, check_acceptance
from bass_jax.decoding.positions import join_tokens
from bass_jax.decoding.state import FinishReason, TokenLogprobs
from bass_jax.drafters import Proposal
from bass_jax.sampling import SamplingArrays, TokenDistribution, token_distribution
from bass_jax.sampling.distribution import log_normalizer
from bass_jax.typing import Array, Float
from kernels_pallas import KernelSampling, ops
from kernels_pallas.targets import current_target


class StepTokens(NamedTuple):
    """What each row may emit, before stops and limits."""

    tokens: Array  # [B, T] int32, accepted drafts and the token after them; what follows means nothing
    num_accepted: Array  # [B] int32
    num_drawable: Array  # [B] int32, leading tokens that were drawn from distributions that exist; T + 1 if none failed
    failure: Array  # [B] int32, `FinishReason` of a row that has fewer of those than it would emit
    logprobs: Array  # [B, T] float32, of `tokens` under the target's raw distribution
    token_logprobs: TokenLogprobs | None


class TargetLogits(NamedTuple):
    """Of the positions of a pass."""

    raw: Array  # [B, T, V] float32, the target's own
    processed: Array  # [B, T, V] float32, what distributions are made of; `raw` itself where nothing is adjusted

    @property
    def is_processed(self) -> bool:
        """Whether the two differ; static."""
        return self.processed is not self.raw


def accept(
    rule: AcceptanceRule,
    proposal: Proposal,
    logits: TargetLogits,
    sampling_arrays: SamplingArrays,
    keys: RuleKeys,
    *,
    kernel: str,
    num_logprobs: int | None = None,
) -> StepTokens:
    """Applies `rule`.

    Args:
        rule: the acceptance rule.
        proposal: drafts ``[B, T - 1]``; T may be 1, a regular step.
        logits: of the target.
        sampling_arrays: per row.
        keys: per row; consumed.
        kernel: ``"pallas"`` runs the greedy and the token rule as `kernels_pallas.ops.masked_acceptance` on a GPU,
            which writes nothing of the size of the vocabulary; ``"xla"`` never does. The tokens are the same.
        num_logprobs: as in `SpecConfig`.
    """
    distribution = token_distribution(logits.processed, sampling_arrays)
    if rule is GREEDY:
        distribution = _greedy_distribution(distribution)
    if kernel == "pallas" and rule in (GREEDY, TOKEN) and _has_kernel(keys):
        result = _by_kernel(rule, proposal, logits.processed, sampling_arrays, keys)
        tokens = join_tokens(proposal.tokens, result.num_accepted, result.next_token)
        if not logits.is_processed and num_logprobs is None:
            # A draft whose distribution is not finite is never accepted, so only the token after the accepted can be
            # broken.
            num_drawable = jnp.where(result.is_valid, logits.raw.shape[1] + 1, result.num_accepted)
            failure = jnp.full_like(num_drawable, FinishReason.NOT_FINITE)
            return StepTokens(tokens, result.num_accepted, num_drawable, failure, result.logprobs, None)
    else:
        result = rule.accept(proposal.tokens, proposal.num_drafted, proposal.probs, distribution, keys)
        result = check_acceptance(rule, result, AcceptanceResult, proposal.num_drafted, logits.raw.shape[-1])
        tokens = join_tokens(proposal.tokens, result.num_accepted, result.next_token)
    return describe(tokens, result.num_accepted, logits, distribution, num_logprobs)


def describe(
    tokens: Array, num_accepted: Array, logits: TargetLogits, distribution: TokenDistribution, num_logprobs: int | None
) -> StepTokens:
    """Says of `tokens` ``[B, T]`` how probable they were, and which were drawn from distributions that exist."""
    normalizer = log_normalizer(logits.raw)
    is_finite = is_drawable = jnp.isfinite(normalizer)
    if logits.is_processed:
        is_drawable &= jnp.isfinite(log_normalizer(logits.processed))
    num_positions = tokens.shape[1]
    num_drawable = jnp.where(is_drawable, num_positions + 1, jnp.arange(num_positions)).min(axis=1)
    is_banned = is_finite & (logits.processed.max(axis=-1) == -jnp.inf)
    first = jnp.minimum(num_drawable, num_positions - 1)[:, None]
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
    return StepTokens(tokens, num_accepted, num_drawable, failure, logprobs, token_logprobs)


def require_greedy(step_tokens: StepTokens, sampling_arrays: SamplingArrays) -> StepTokens:
    """Lets rows emit nothing whose temperature is not 0, for rules that decode greedily."""
    is_greedy = jnp.asarray(sampling_arrays.temperature) == 0
    return step_tokens._replace(
        num_drawable=jnp.where(is_greedy, step_tokens.num_drawable, 0),
        failure=jnp.where(is_greedy, step_tokens.failure, FinishReason.NOT_GREEDY),
    )


def _greedy_distribution(distribution: TokenDistribution) -> TokenDistribution:
    """The greedy rule's distribution is one-hot, whatever the temperature; lazy like the distribution itself."""
    return distribution._replace(
        probs=jax.nn.one_hot(distribution.argmax, distribution.probs.shape[-1], dtype=jnp.float32)
    )


def _by_kernel(
    rule, proposal: Proposal, logits: Float[Array, "B T V"], sampling_arrays: SamplingArrays, keys: RuleKeys
):
    warps = jax.tree.map(jnp.asarray, sampling_arrays[:4])
    if rule is GREEDY:
        warps = (jnp.zeros_like(warps[0]), *warps[1:])
    accept_key, residual_key = (jax.random.key_data(key) for key in (keys.accept, keys.residual))
    return ops.masked_acceptance(
        proposal.tokens, proposal.num_drafted, logits, proposal.probs, accept_key, residual_key, KernelSampling(*warps)
    )


def _has_kernel(keys: RuleKeys) -> bool:
    """Whether this is traced for a GPU, with keys of the generator that the kernel computes itself."""
    return current_target().platform == "gpu" and str(jax.random.key_impl(keys.residual)) == "threefry2x32"
