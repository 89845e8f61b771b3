"""A rule to copy: the strictest one, which accepts nothing and draws from the target.

Lossless, and slow: it shows the protocol. Name yours in a config as ``"my_module:MY_RULE"``, or call
`register_rule` on it; the protocol tests run over every registered rule.
"""

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys
from bass_jax.sampling.distribution import TokenDistribution, draw
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Accepts no draft; the next token comes from the target's distribution at the first position."""
    del draft_tokens, draft_probs
    probs = target.probs[:, 0]
    return AcceptanceResult(jnp.zeros_like(num_drafted), draw(probs, gumbel(keys.residual, probs.shape[-1])))


REJECT_ALL = AcceptanceRule(
    name="reject_all", accept=accept, lossless=True, noise="step", source="a template; no paper"
)
