"""Rules that trade the target's distribution for longer accepted runs; each says so on its face."""

import functools

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, register_factory, register_rule
from bass_jax.acceptance.greedy import leading_run
from bass_jax.sampling.distribution import TokenDistribution, draw
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array, Bool


def _verdict(
    is_accepted: Bool[Array, "B G"], num_drafted: Array, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """The leading run stands; the next token comes from the target's distribution, whatever was rejected."""
    num_accepted = leading_run(is_accepted, num_drafted)
    probs = target.probs[jnp.arange(num_drafted.shape[0]), num_accepted]
    return AcceptanceResult(num_accepted, draw(probs, gumbel(keys.residual, probs.shape[-1])))


def _accept_typical(
    draft_tokens: Array,
    num_drafted: Array,
    draft_probs: Array | None,
    target: TokenDistribution,
    keys: RuleKeys,
    *,
    epsilon: float,
    delta: float,
) -> AcceptanceResult:
    """A draft stands if ``target(x) > min(epsilon, delta * exp(-entropy of the target))``."""
    del draft_probs
    distributions = target.probs[:, :-1]
    entropy = -jnp.where(
        distributions > 0, distributions * jnp.log(jnp.where(distributions > 0, distributions, 1.0)), 0.0
    ).sum(axis=-1)
    target_prob = jnp.take_along_axis(distributions, draft_tokens[..., None], axis=2)[..., 0]
    is_accepted = target_prob > jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    return _verdict(is_accepted, num_drafted, target, keys)


def _accept_threshold(
    draft_tokens: Array,
    num_drafted: Array,
    draft_probs: Array | None,
    target: TokenDistribution,
    keys: RuleKeys,
    *,
    fraction: float,
) -> AcceptanceResult:
    """A draft stands if it is at least `fraction` as probable as the target's most probable token."""
    del draft_probs
    distributions = target.probs[:, :-1]
    target_prob = jnp.take_along_axis(distributions, draft_tokens[..., None], axis=2)[..., 0]
    return _verdict(target_prob >= fraction * distributions.max(axis=-1), num_drafted, target, keys)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> AcceptanceRule:
    """Makes the typical rule: the flatter the target, the more drafts are good enough.

    Args:
        epsilon: probability that always is enough, 0 to 1.
        delta: share of ``exp(-entropy)`` that is enough, above 0.

    Raises:
        ValueError: if one is out of range.
    """
    if not 0 < epsilon <= 1:
        raise ValueError(f"epsilon={epsilon}: expected a number above 0 and at most 1")
    if not 0 < delta <= 1:
        raise ValueError(f"delta={delta}: expected a number above 0 and at most 1")
    accept = functools.partial(_accept_typical, epsilon=epsilon, delta=delta)
    source = "Cai et al. 2024 (Medusa, arXiv 2401.10774): typical acceptance"
    return AcceptanceRule(name="typical", accept=accept, lossless=False, noise="step", source=source)


def threshold(fraction: float = 0.3) -> AcceptanceRule:
    """Makes the threshold rule: a draft is good enough if it is nearly the target's favorite.

    Args:
        fraction: of the most probable token's probability, above 0 and at most 1; 1 is exact match.

    Raises:
        ValueError: if it is out of range.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: expected a number above 0 and at most 1")
    accept = functools.partial(_accept_threshold, fraction=fraction)
    source = "Stern et al. 2018 (arXiv 1811.03115): approximate acceptance"
    return AcceptanceRule(name="threshold", accept=accept, lossless=False, noise="step", source=source)


TYPICAL = register_rule(typical())
THRESHOLD = register_rule(threshold())
register_factory("typical", typical)
register_factory("threshold", threshold)
