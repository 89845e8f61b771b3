"""What decided over a step's drafts, for traces."""

import jax.numpy as jnp

from bass_jax.acceptance import RuleKeys
from bass_jax.decoding.state import DraftRecord
from bass_jax.drafters import Proposal
from bass_jax.sampling import SamplingArrays, token_distribution
from bass_jax.sampling.keys import uniform
from bass_jax.typing import Array, Float


def record_drafts(
    proposal: Proposal, logits: Float[Array, "B T V"], sampling_arrays: SamplingArrays, keys: RuleKeys
) -> DraftRecord:
    """Looks the drafts up in both distributions.

    Args:
        proposal: drafts ``[B, G]``.
        logits: of the target, adjusted, over ``G + 1`` positions.
        sampling_arrays: per row.
        keys: of the step; the draws are those that a rule makes from ``keys.accept``.
    """
    num_drafts = proposal.tokens.shape[1]
    tokens = proposal.tokens[..., None]
    token_logprobs = token_distribution(logits[:, :num_drafts], sampling_arrays).probs
    target = jnp.log(jnp.take_along_axis(token_logprobs, tokens, axis=2)[..., 0])
    draft = jnp.zeros_like(target)
    if proposal.probs is not None:
        draft = jnp.log(jnp.take_along_axis(proposal.probs, tokens, axis=2)[..., 0])
    return DraftRecord(target, draft, uniform(keys.accept, num_drafts), proposal.confidence)
