"""The block rule: decides about whole prefixes, and accepts at least as many drafts on average as the token rule."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, register_rule
from bass_jax.sampling.distribution import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import gumbel, uniform
from bass_jax.typing import Array, Float


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Tests every prefix independently, and accepts the longest one that passes.

    Let ``p_0 = 1``, ``p_i = min(p_{i-1} * target(x_i) / draft(x_i), 1)`` and
    ``Z_i = sum_x max(p_i * target(x | x_1..i) - draft(x | x_1..i), 0)``. The prefix of length i passes with probability
    ``h_i = Z_i / (Z_i + 1 - p_i)``, and the row's whole draft with ``p_i``. If n drafts are accepted, the next token is
    sampled from ``max(p_n * target - draft, 0)``, or from the target's distribution if all are.
    """
    num_slots, vocab_size = draft_tokens.shape[1], target.probs.shape[-1]
    if num_slots == 0:
        return AcceptanceResult(
            jnp.zeros_like(num_drafted), sample_tokens(target.probs[:, 0], gumbel(keys.residual, vocab_size))
        )
    lengths = jnp.arange(1, num_slots + 1)
    pass_probs, excess = prefix_probs(draft_tokens, num_drafted, draft_probs, target)
    # Uniform numbers are in (0, 1], so probability 1 always passes and probability 0 never does.
    passes = (uniform(keys.accept, num_slots) <= pass_probs) & (lengths <= num_drafted[:, None])
    num_accepted = jnp.where(passes, lengths, 0).max(axis=1).astype(jnp.int32)

    rows = jnp.arange(draft_tokens.shape[0])
    probs = target.probs[rows, num_accepted]
    residual = excess[rows, jnp.minimum(num_accepted, num_slots - 1)]
    use_residual = (num_accepted < num_drafted) & (residual.sum(axis=-1) > 0)
    probs = jnp.where(use_residual[:, None], residual, probs)
    return AcceptanceResult(num_accepted, sample_tokens(probs, gumbel(keys.residual, vocab_size)))


def prefix_probs(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution
) -> tuple[Float[Array, "B G"], Float[Array, "B G V"]]:
    """Returns ``h_1`` to ``h_G``, and ``max(p_n * target - draft, 0)`` for n = 0 to G - 1."""
    num_slots, vocab_size = draft_tokens.shape[1], target.probs.shape[-1]
    if draft_probs is None:
        draft_probs = jax.nn.one_hot(draft_tokens, vocab_size, dtype=jnp.float32)
    ratios = _prefix_ratios(draft_tokens, draft_probs, target.probs)  # [B, G + 1]
    excess = jnp.maximum(ratios[:, :-1, None] * target.probs[:, :-1] - draft_probs, 0.0)
    mass = excess.sum(axis=-1)
    denominator = mass + 1.0 - ratios[:, :-1]
    pass_probs = jnp.where(denominator > 0, mass / jnp.where(denominator > 0, denominator, 1.0), 1.0)
    # No draft was sampled after the row's last one, so the whole draft passes with probability p.
    pass_probs = jnp.concatenate([pass_probs[:, 1:], ratios[:, -1:]], axis=1)
    is_last = jnp.arange(1, num_slots + 1) == num_drafted[:, None]
    return jnp.where(is_last, ratios[:, 1:], pass_probs), excess


def _prefix_ratios(draft_tokens: Array, draft_probs: Array, target_probs: Array) -> Float[Array, "B T"]:
    """Returns ``p_0`` to ``p_G``."""
    token = draft_tokens[..., None]
    target_prob = jnp.take_along_axis(target_probs[:, :-1], token, axis=2)[..., 0]
    draft_prob = jnp.take_along_axis(draft_probs, token, axis=2)[..., 0]
    # Only padding can have a draft probability of 0.
    ratio = jnp.where(draft_prob > 0, target_prob / jnp.where(draft_prob > 0, draft_prob, 1.0), 0.0)

    def extend(prefix, ratio):
        prefix = jnp.minimum(prefix * ratio, 1.0)
        return prefix, prefix

    start = jnp.ones_like(ratio[:, 0])
    return jnp.concatenate([start[:, None], jax.lax.scan(extend, start, ratio.T)[1].T], axis=1)


BLOCK = register_rule(
    AcceptanceRule(
        name="block",
        accept=accept,
        lossless=True,
        noise="step",
        source="Sun et al. 2025 (arXiv 2403.10444): block verification",
    )
)
