"""The greedy rule: a draft stands while it is the target's most probable token."""

import jax.numpy as jnp

from bass_jax.sampling.law import Law
from bass_jax.sampling.rules import AcceptanceRule, RuleKeys, Verdict, register_rule
from bass_jax.typing import Array, Bool, Int


def leading_run(is_accepted: Bool[Array, "B G"], num_drafted: Int[Array, "B"]) -> Int[Array, "B"]:
    """Counts the accepted drafts before the first that fails or was not drafted."""
    num_slots = is_accepted.shape[1]
    is_real = jnp.arange(num_slots) < num_drafted[:, None]
    return jnp.cumprod((is_accepted & is_real).astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def judge(draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: Law, keys: RuleKeys) -> Verdict:
    """Compares drafts with the target's mode; temperature and noise play no part."""
    del draft_probs, keys
    num_accepted = leading_run(draft_tokens == target.mode[:, :-1], num_drafted)
    return Verdict(num_accepted, jnp.take_along_axis(target.mode, num_accepted[:, None], axis=1)[:, 0])


GREEDY = register_rule(
    AcceptanceRule(
        name="greedy",
        judge=judge,
        lossless=True,
        noise="none",
        source="Stern et al. 2018 (arXiv 1811.03115), section 3: blockwise parallel decoding's exact match",
    )
)
"""Exact for rows at temperature 0; it decodes every row greedily, whatever its temperature says."""
