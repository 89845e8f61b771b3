"""The multi-draft rule: several chains of drafts per row, first tokens drawn without replacement."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance import token as token_rule
from bass_jax.acceptance.base import AcceptanceRule, ChainVerdict, RuleKeys, register_rule
from bass_jax.sampling.distribution import Law, draw
from bass_jax.sampling.keys import gumbel, uniform
from bass_jax.typing import Array


def judge_chains(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: Law, keys: RuleKeys
) -> ChainVerdict:
    """Tries the first tokens one after the other, then goes on with the token rule inside the chain that stands.

    Each first token is judged against what the rejections before it left of the target's law,
    ``norm(max(target - draft, 0))``, with the draft's law that it was drawn from, earlier first tokens removed.
    Where none stands, the next token comes from what is left after all of them.
    """
    num_rows, num_chains, num_slots = draft_tokens.shape
    vocab_size = target.probs.shape[-1]
    rows = jnp.arange(num_rows)
    uniforms = uniform(keys.accept, num_chains)
    left = target.probs[:, 0, 0]
    chain = jnp.full(num_rows, -1, jnp.int32)
    for index in range(num_chains):
        first = draft_tokens[:, index, 0]
        law = jax.nn.one_hot(first, vocab_size, dtype=jnp.float32)
        if draft_probs is not None:
            law = draft_probs[:, index, 0]
        is_tried = (chain < 0) & (num_drafted[:, index] > 0)
        target_prob, draft_prob = left[rows, first], law[rows, first]
        stands = is_tried & (target_prob > 0) & (uniforms[:, index] * draft_prob <= target_prob)
        chain = jnp.where(stands, index, chain)
        residual = jnp.maximum(left - law, 0.0)
        mass = residual.sum(axis=-1)
        # A residual of zero is possible by rounding alone; what was left before stays.
        is_rejected = is_tried & ~stands & (mass > 0)
        left = jnp.where(is_rejected[:, None], residual / jnp.where(mass > 0, mass, 1.0)[:, None], left)

    does_stand = chain >= 0
    chain = jnp.maximum(chain, 0)
    rest = token_rule.judge(
        draft_tokens[rows, chain, 1:],
        jnp.where(does_stand, num_drafted[rows, chain] - 1, 0),
        None if draft_probs is None else draft_probs[rows, chain, 1:],
        Law(probs=target.probs[rows, chain, 1:], mode=target.mode[rows, chain, 1:]),
        keys._replace(accept=jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.accept, num_slots)),
    )
    next_token = jnp.where(does_stand, rest.next_token, draw(left, gumbel(keys.residual, vocab_size)))
    return ChainVerdict(chain, jnp.where(does_stand, rest.num_accepted + 1, 0), next_token)


MULTI_DRAFT = register_rule(
    AcceptanceRule(
        name="multi_draft",
        judge=token_rule.judge,
        lossless=True,
        noise="step",
        source="Jeon et al. 2024 (arXiv 2402.14160), recursive rejection without replacement, at the first token; "
        "then the token rule",
        judge_chains=judge_chains,
    )
)
"""With one chain it is the token rule."""
