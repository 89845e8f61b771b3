"""The token rule: accepts each draft with probability min(1, target / draft)."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, leading_run, register_rule
from bass_jax.sampling.distribution import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import gumbel, uniform
from bass_jax.typing import Array


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Accepts drafts by the ratio of the probabilities.

    After a rejection the next token is sampled from the residual ``max(target - draft, 0)``, otherwise from the
    target's distribution. A draft whose target probability is 0 is never accepted, independent of rounding. Rounding
    can make the residual zero everywhere; the target's distribution is then used instead.
    """
    num_slots, vocab_size = draft_tokens.shape[1], target.probs.shape[-1]
    token = draft_tokens[..., None]
    target_prob = jnp.take_along_axis(target.probs[:, :-1], token, axis=2)[..., 0]
    draft_prob = 1.0 if draft_probs is None else jnp.take_along_axis(draft_probs, token, axis=2)[..., 0]
    is_accepted = (target_prob > 0) & (uniform(keys.accept, num_slots) * draft_prob <= target_prob)
    num_accepted = leading_run(is_accepted, num_drafted)

    probs = _at(target.probs, num_accepted)
    if num_slots:
        last = jnp.minimum(num_accepted, num_slots - 1)
        if draft_probs is None:
            rejected_probs = jax.nn.one_hot(_at(draft_tokens, last), vocab_size, dtype=jnp.float32)
        else:
            rejected_probs = _at(draft_probs, last)
        residual = jnp.maximum(probs - rejected_probs, 0.0)
        use_residual = (num_accepted < num_drafted) & (residual.sum(axis=-1) > 0)
        probs = jnp.where(use_residual[:, None], residual, probs)
    return AcceptanceResult(num_accepted, sample_tokens(probs, gumbel(keys.residual, vocab_size)))


def _at(values: Array, index: Array) -> Array:
    """Returns ``values[b, index[b]]`` for every row b."""
    return values[jnp.arange(values.shape[0]), index]


TOKEN = register_rule(
    AcceptanceRule(
        name="token",
        accept=accept,
        lossless=True,
        noise="step",
        source="Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318)",
    )
)
