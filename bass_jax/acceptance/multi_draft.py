"""The multi-draft rule: several chains of drafts per row, first tokens drawn without replacement."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance import token as token_rule
from bass_jax.acceptance.base import AcceptanceRule, MultiDraftAcceptanceResult, RuleKeys, register_rule
from bass_jax.sampling.distribution import TokenDistribution, draw
from bass_jax.sampling.keys import gumbel, uniform
from bass_jax.typing import Array


def accept_candidates(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> MultiDraftAcceptanceResult:
    """Tries the first tokens one after the other, then goes on with the token rule inside the chain that stands.

    Each first token is evaluated against what the rejections before it left of the target's distribution,
    ``norm(max(target - draft, 0))``, with the draft's distribution that it was drawn from, earlier first tokens
    removed. Where none stands, the next token comes from what is left after all of them.
    """
    num_rows, num_candidates, num_slots = draft_tokens.shape
    vocab_size = target.probs.shape[-1]
    rows = jnp.arange(num_rows)
    uniforms = uniform(keys.accept, num_candidates)
    left = target.probs[:, 0, 0]
    candidate = jnp.full(num_rows, -1, jnp.int32)
    for index in range(num_candidates):
        first = draft_tokens[:, index, 0]
        distribution = jax.nn.one_hot(first, vocab_size, dtype=jnp.float32)
        if draft_probs is not None:
            distribution = draft_probs[:, index, 0]
        is_tried = (candidate < 0) & (num_drafted[:, index] > 0)
        target_prob, draft_prob = left[rows, first], distribution[rows, first]
        is_accepted = is_tried & (target_prob > 0) & (uniforms[:, index] * draft_prob <= target_prob)
        candidate = jnp.where(is_accepted, index, candidate)
        residual = jnp.maximum(left - distribution, 0.0)
        mass = residual.sum(axis=-1)
        # A residual of zero is possible by rounding alone; what was left before stays.
        is_rejected = is_tried & ~is_accepted & (mass > 0)
        left = jnp.where(is_rejected[:, None], residual / jnp.where(mass > 0, mass, 1.0)[:, None], left)

    is_accepted = candidate >= 0
    candidate = jnp.maximum(candidate, 0)
    rest = token_rule.accept(
        draft_tokens[rows, candidate, 1:],
        jnp.where(is_accepted, num_drafted[rows, candidate] - 1, 0),
        None if draft_probs is None else draft_probs[rows, candidate, 1:],
        TokenDistribution(probs=target.probs[rows, candidate, 1:], argmax=target.argmax[rows, candidate, 1:]),
        keys._replace(accept=jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.accept, num_slots)),
    )
    next_token = jnp.where(is_accepted, rest.next_token, draw(left, gumbel(keys.residual, vocab_size)))
    return MultiDraftAcceptanceResult(candidate, jnp.where(is_accepted, rest.num_accepted + 1, 0), next_token)


MULTI_DRAFT = register_rule(
    AcceptanceRule(
        name="multi_draft",
        accept=token_rule.accept,
        lossless=True,
        noise="step",
        source="Jeon et al. 2024 (arXiv 2402.14160), recursive rejection without replacement, at the first token; "
        "then the token rule",
        accept_candidates=accept_candidates,
    )
)
"""With one chain it is the token rule."""
