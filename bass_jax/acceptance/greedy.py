"""The greedy rule: a draft stands while it is the target's most probable token."""

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceRule, ChainVerdict, RuleKeys, Verdict, register_rule
from bass_jax.sampling.distribution import Law
from bass_jax.typing import Array, Bool, Int


def leading_run(is_accepted: Bool[Array, "... G"], num_drafted: Int[Array, "..."]) -> Int[Array, "..."]:
    """Counts the accepted drafts before the first that fails or was not drafted."""
    is_real = jnp.arange(is_accepted.shape[-1]) < num_drafted[..., None]
    return jnp.cumprod((is_accepted & is_real).astype(jnp.int32), axis=-1).sum(axis=-1, dtype=jnp.int32)


def judge(draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: Law, keys: RuleKeys) -> Verdict:
    """Compares drafts with the target's mode; temperature and noise play no part."""
    del draft_probs, keys
    num_accepted = leading_run(draft_tokens == target.mode[:, :-1], num_drafted)
    return Verdict(num_accepted, jnp.take_along_axis(target.mode, num_accepted[:, None], axis=1)[:, 0])


def judge_chains(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: Law, keys: RuleKeys
) -> ChainVerdict:
    """Follows the chain that begins with the target's mode; first tokens differ, so there is one at the most."""
    rows = jnp.arange(draft_tokens.shape[0])
    is_right = (draft_tokens[:, :, 0] == target.mode[:, :, 0]) & (num_drafted > 0)
    chain = jnp.argmax(is_right, axis=1).astype(jnp.int32)
    of_chain = Law(probs=target.probs[rows, chain], mode=target.mode[rows, chain])
    verdict = judge(draft_tokens[rows, chain], num_drafted[rows, chain], None, of_chain, keys)
    return ChainVerdict(chain, *verdict)


GREEDY = register_rule(
    AcceptanceRule(
        name="greedy",
        judge=judge,
        lossless=True,
        noise="none",
        source="Stern et al. 2018 (arXiv 1811.03115), section 3: blockwise parallel decoding's exact match",
        judge_chains=judge_chains,
    )
)
"""For rows at temperature 0 alone; a row with another ends as `FinishReason.NOT_GREEDY`."""
