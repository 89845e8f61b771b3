"""The greedy rule: accepts drafts that are the target's most probable tokens."""

import jax.numpy as jnp

from bass_jax.acceptance.base import (
    AcceptanceResult,
    AcceptanceRule,
    MultiDraftAcceptanceResult,
    RuleKeys,
    leading_run,
    register_rule,
)
from bass_jax.sampling.distribution import TokenDistribution
from bass_jax.typing import Array


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Compares the drafts with the argmax of the target's logits."""
    del draft_probs, keys
    num_accepted = leading_run(draft_tokens == target.argmax[:, :-1], num_drafted)
    return AcceptanceResult(num_accepted, jnp.take_along_axis(target.argmax, num_accepted[:, None], axis=1)[:, 0])


def accept_candidates(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> MultiDraftAcceptanceResult:
    """Accepts from the candidate that begins with the target's most probable token; at most one does."""
    rows = jnp.arange(draft_tokens.shape[0])
    is_right = (draft_tokens[:, :, 0] == target.argmax[:, :, 0]) & (num_drafted > 0)
    candidate = jnp.argmax(is_right, axis=1).astype(jnp.int32)
    chosen = TokenDistribution(probs=target.probs[rows, candidate], argmax=target.argmax[rows, candidate])
    result = accept(draft_tokens[rows, candidate], num_drafted[rows, candidate], None, chosen, keys)
    return MultiDraftAcceptanceResult(candidate, *result)


GREEDY = register_rule(
    AcceptanceRule(
        name="greedy",
        accept=accept,
        lossless=True,
        noise="none",
        source="Stern et al. 2018 (arXiv 1811.03115), section 3: blockwise parallel decoding's exact match",
        accept_candidates=accept_candidates,
    )
)
"""Only for rows at temperature 0. Other rows end with `FinishReason.NOT_GREEDY`."""
