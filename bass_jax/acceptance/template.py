"""A rule to copy: accepts no draft and samples from the target's distribution.

It is lossless, and no faster than regular decoding. Name your rule in a configuration as ``"my_module:MY_RULE"``, or
register it with `register_rule`. The protocol tests run over every registered rule.
"""

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys
from bass_jax.sampling.distribution import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Accepts no draft, and samples the next token from the target's distribution at the first position."""
    del draft_tokens, draft_probs
    probs = target.probs[:, 0]
    return AcceptanceResult(jnp.zeros_like(num_drafted), sample_tokens(probs, gumbel(keys.residual, probs.shape[-1])))


REJECT_ALL = AcceptanceRule(
    name="reject_all", accept=accept, lossless=True, noise="step", source="a template; no paper"
)
