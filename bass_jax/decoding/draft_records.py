"""Records the probabilities and random numbers that decided on the drafts of a step, for traces."""

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
    """Looks up the drafts in both distributions.

    Args:
        proposal: drafts ``[B, G]``.
        logits: ``[B, G + 1, V]``, of the target, after the logits processors.
        sampling_arrays: per row.
        keys: of the step. Rejection rules make the same uniform random numbers from ``keys.accept``.
    """
    num_drafts = proposal.tokens.shape[1]
    tokens = proposal.tokens[..., None]
    target_probs = token_distribution(logits[:, :num_drafts], sampling_arrays).probs
    target = jnp.log(jnp.take_along_axis(target_probs, tokens, axis=2)[..., 0])
    draft = jnp.zeros_like(target)
    if proposal.probs is not None:
        draft = jnp.log(jnp.take_along_axis(proposal.probs, tokens, axis=2)[..., 0])
    return DraftRecord(target, draft, uniform(keys.accept, num_drafts), proposal.confidence)
