"""Lossy rules, which accept more drafts at the cost of changing the distribution of the output."""

import functools

import jax.numpy as jnp

from bass_jax.acceptance.base import (
    AcceptanceResult,
    AcceptanceRule,
    RuleKeys,
    leading_run,
    register_factory,
    register_rule,
)
from bass_jax.sampling.distribution import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array, Bool


def _accept_prefix(
    is_accepted: Bool[Array, "B G"], num_drafted: Array, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Accepts the longest prefix of accepted drafts, and samples the next token from the target's distribution."""
    num_accepted = leading_run(is_accepted, num_drafted)
    probs = target.probs[jnp.arange(num_drafted.shape[0]), num_accepted]
    return AcceptanceResult(num_accepted, sample_tokens(probs, gumbel(keys.residual, probs.shape[-1])))


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
    """Accepts a draft x if ``target(x) > min(epsilon, delta * exp(-entropy of the target))``."""
    del draft_probs
    probs = target.probs[:, :-1]
    entropy = -jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1.0)), 0.0).sum(axis=-1)
    target_prob = jnp.take_along_axis(probs, draft_tokens[..., None], axis=2)[..., 0]
    is_accepted = target_prob > jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    return _accept_prefix(is_accepted, num_drafted, target, keys)


def _accept_threshold(
    draft_tokens: Array,
    num_drafted: Array,
    draft_probs: Array | None,
    target: TokenDistribution,
    keys: RuleKeys,
    *,
    fraction: float,
) -> AcceptanceResult:
    """Accepts a draft that is at least `fraction` times as probable as the target's most probable token."""
    del draft_probs
    probs = target.probs[:, :-1]
    target_prob = jnp.take_along_axis(probs, draft_tokens[..., None], axis=2)[..., 0]
    return _accept_prefix(target_prob >= fraction * probs.max(axis=-1), num_drafted, target, keys)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> AcceptanceRule:
    """Returns a rule whose threshold falls with the entropy of the target's distribution.

    Args:
        epsilon: a draft with a higher target probability is always accepted; above 0 and at most 1.
        delta: a draft with a target probability above ``delta * exp(-entropy)`` is accepted; above 0 and at most 1.

    Raises:
        ValueError: if an argument is out of range.
    """
    if not 0 < epsilon <= 1:
        raise ValueError(f"epsilon={epsilon}: expected a number above 0 and at most 1")
    if not 0 < delta <= 1:
        raise ValueError(f"delta={delta}: expected a number above 0 and at most 1")
    accept = functools.partial(_accept_typical, epsilon=epsilon, delta=delta)
    source = "Cai et al. 2024 (Medusa, arXiv 2401.10774): typical acceptance"
    return AcceptanceRule(name="typical", accept=accept, lossless=False, noise="step", source=source)


def threshold(fraction: float = 0.3) -> AcceptanceRule:
    """Returns a rule that accepts drafts whose probability is close to that of the target's most probable token.

    Args:
        fraction: of the most probable token's probability; above 0 and at most 1. 1 is an exact match.

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
