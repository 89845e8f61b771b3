"""A rule for speed studies: accepts drafts at random with given probabilities."""

import functools

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, leading_run, register_factory
from bass_jax.sampling.distribution import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import gumbel, uniform
from bass_jax.typing import Array


def _accept(
    draft_tokens: Array,
    num_drafted: Array,
    draft_probs: Array | None,
    target: TokenDistribution,
    keys: RuleKeys,
    *,
    rates: tuple[float, ...],
) -> AcceptanceResult:
    del draft_probs
    num_slots = draft_tokens.shape[1]
    accept_probs = jnp.asarray([rates[min(slot, len(rates) - 1)] for slot in range(num_slots)], jnp.float32)
    # Uniform numbers are in (0, 1], so a rate of 0 accepts nothing and a rate of 1 accepts everything.
    num_accepted = leading_run(uniform(keys.accept, num_slots) <= accept_probs, num_drafted)
    probs = target.probs[jnp.arange(num_drafted.shape[0]), num_accepted]
    return AcceptanceResult(num_accepted, sample_tokens(probs, gumbel(keys.residual, probs.shape[-1])))


def synthetic(*rates: float) -> AcceptanceRule:
    """Returns a rule that accepts draft i with probability ``rates[i]`` if the drafts before it are accepted.

    It measures the speed that a better drafter would give. The output does not follow the target's distribution. In a
    configuration: ``SpecConfig(acceptance="synthetic(0.8)")``.

    Args:
        rates: by position, 0 to 1; the last one is used for all later positions.

    Raises:
        ValueError: if there is no rate, or one is out of range.
    """
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"synthetic acceptance {rates}: expected numbers from 0 to 1, one or one per position")
    name = f"synthetic({', '.join(f'{rate:g}' for rate in rates)})"
    accept = functools.partial(_accept, rates=tuple(rates))
    return AcceptanceRule(name, accept, lossless=False, noise="step", source="forced acceptance, for speed studies")


register_factory("synthetic", synthetic)
