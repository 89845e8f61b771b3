"""The multi-draft rule: several candidate drafts per row, with first tokens sampled without replacement."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance import token as token_rule
from bass_jax.acceptance.base import AcceptanceRule, MultiDraftAcceptanceResult, RuleKeys, register_rule
from bass_jax.sampling.distribution import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import gumbel, uniform
from bass_jax.typing import Array


def accept_candidates(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> MultiDraftAcceptanceResult:
    """Tests the candidates' first tokens in order, then applies the token rule to the rest of the accepted candidate.

    Every rejection replaces the target's distribution by the residual, ``norm(max(target - draft, 0))``. Here `draft`
    is the distribution that the first token was sampled from, without the first tokens of earlier candidates. If no
    first token is accepted, the next token is sampled from the last residual.
    """
    num_rows, num_candidates, num_slots = draft_tokens.shape
    vocab_size = target.probs.shape[-1]
    rows = jnp.arange(num_rows)
    uniforms = uniform(keys.accept, num_candidates)
    residual = target.probs[:, 0, 0]
    candidate = jnp.full(num_rows, -1, jnp.int32)
    for index in range(num_candidates):
        first = draft_tokens[:, index, 0]
        distribution = jax.nn.one_hot(first, vocab_size, dtype=jnp.float32)
        if draft_probs is not None:
            distribution = draft_probs[:, index, 0]
        is_tried = (candidate < 0) & (num_drafted[:, index] > 0)
        target_prob, draft_prob = residual[rows, first], distribution[rows, first]
        is_accepted = is_tried & (target_prob > 0) & (uniforms[:, index] * draft_prob <= target_prob)
        candidate = jnp.where(is_accepted, index, candidate)
        excess = jnp.maximum(residual - distribution, 0.0)
        mass = excess.sum(axis=-1)
        # Rounding can make the new residual zero everywhere. The previous one is then kept.
        is_rejected = is_tried & ~is_accepted & (mass > 0)
        residual = jnp.where(is_rejected[:, None], excess / jnp.where(mass > 0, mass, 1.0)[:, None], residual)

    is_accepted = candidate >= 0
    candidate = jnp.maximum(candidate, 0)
    rest = token_rule.accept(
        draft_tokens[rows, candidate, 1:],
        jnp.where(is_accepted, num_drafted[rows, candidate] - 1, 0),
        None if draft_probs is None else draft_probs[rows, candidate, 1:],
        TokenDistribution(probs=target.probs[rows, candidate, 1:], argmax=target.argmax[rows, candidate, 1:]),
        keys._replace(accept=jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.accept, num_slots)),
    )
    next_token = jnp.where(is_accepted, rest.next_token, sample_tokens(residual, gumbel(keys.residual, vocab_size)))
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
"""With one candidate it is the token rule."""
