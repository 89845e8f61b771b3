"""A rule for speed studies: drafts stand by a coin, whatever they are."""

import functools

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, register_factory
from bass_jax.acceptance.greedy import leading_run
from bass_jax.sampling.distribution import TokenDistribution, draw
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
    chances = jnp.asarray([rates[min(slot, len(rates) - 1)] for slot in range(num_slots)], jnp.float32)
    # A uniform is never 0, so that a rate of 0 accepts nothing; it may be 1, so that a rate of 1 accepts all.
    num_accepted = leading_run(uniform(keys.accept, num_slots) <= chances, num_drafted)
    probs = target.probs[jnp.arange(num_drafted.shape[0]), num_accepted]
    return AcceptanceResult(num_accepted, draw(probs, gumbel(keys.residual, probs.shape[-1])))


def synthetic(*rates: float) -> AcceptanceRule:
    """Makes the rule that accepts draft i, given those before it, with probability ``rates[i]``.

    Times a decoder as if it had a good draft; what it writes is no sample of the target. Its name says so:
    ``SpecConfig(acceptance="synthetic(0.8)")``.

    Args:
        rates: by position, 0 to 1; the last one serves all positions after it.

    Raises:
        ValueError: if there are none, or one is out of range.
    """
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"synthetic acceptance {rates}: expected numbers from 0 to 1, one or one per position")
    name = f"synthetic({', '.join(f'{rate:g}' for rate in rates)})"
    accept = functools.partial(_accept, rates=tuple(rates))
    return AcceptanceRule(name, accept, lossless=False, noise="step", source="forced acceptance, for speed studies")


register_factory("synthetic", synthetic)
