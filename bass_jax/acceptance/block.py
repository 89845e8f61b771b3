"""The block rule: drafts are accepted together, never fewer in expectation than by the token rule."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, register_rule
from bass_jax.sampling.distribution import TokenDistribution, draw
from bass_jax.sampling.keys import gumbel, uniform
from bass_jax.typing import Array, Float


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Accepts the longest prefix whose own draw succeeds; a failure does not stop the draws behind it.

    With ``p_0 = 1`` and ``p_i = min(p_{i-1} * target(x_i) / draft(x_i), 1)``, the prefix of length i stands with
    probability ``h_i = Z_i / (Z_i + 1 - p_i)``, where ``Z_i = sum_x max(p_i * target(x | x_1..i) - draft(x | x_1..i),
    0)``; the row's last with ``p_i``. The longest that stands has length n; the next token follows
    ``max(p_n * target - draft, 0)``, or the target where all drafts stand.
    """
    num_slots, vocab_size = draft_tokens.shape[1], target.probs.shape[-1]
    if num_slots == 0:
        return AcceptanceResult(
            jnp.zeros_like(num_drafted), draw(target.probs[:, 0], gumbel(keys.residual, vocab_size))
        )
    lengths = jnp.arange(1, num_slots + 1)
    is_accepted, excess = prefix_probs(draft_tokens, num_drafted, draft_probs, target)
    # A uniform of 1 passes where the probability is 1, and none where it is 0.
    is_accepted = (uniform(keys.accept, num_slots) <= is_accepted) & (lengths <= num_drafted[:, None])
    num_accepted = jnp.where(is_accepted, lengths, 0).max(axis=1).astype(jnp.int32)

    rows = jnp.arange(draft_tokens.shape[0])
    probs = target.probs[rows, num_accepted]
    residual = excess[rows, jnp.minimum(num_accepted, num_slots - 1)]
    use_residual = (num_accepted < num_drafted) & (residual.sum(axis=-1) > 0)
    probs = jnp.where(use_residual[:, None], residual, probs)
    return AcceptanceResult(num_accepted, draw(probs, gumbel(keys.residual, vocab_size)))


def prefix_probs(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution
) -> tuple[Float[Array, "B G"], Float[Array, "B G V"]]:
    """Returns ``h_1`` to ``h_G``, and ``max(p_n * target - draft, 0)`` of the positions after n = 0 to G - 1 drafts."""
    num_slots, vocab_size = draft_tokens.shape[1], target.probs.shape[-1]
    if draft_probs is None:
        draft_probs = jax.nn.one_hot(draft_tokens, vocab_size, dtype=jnp.float32)
    prefix_prob = _prefix_probs(draft_tokens, draft_probs, target.probs)  # [B, G + 1], p_0 to p_G
    excess = jnp.maximum(prefix_prob[:, :-1, None] * target.probs[:, :-1] - draft_probs, 0.0)
    mass = excess.sum(axis=-1)
    room = mass + 1.0 - prefix_prob[:, :-1]
    is_accepted = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
    # The distribution after the row's last draft was never drafted from: that prefix stands with p itself.
    is_accepted = jnp.concatenate([is_accepted[:, 1:], prefix_prob[:, -1:]], axis=1)
    is_last = jnp.arange(1, num_slots + 1) == num_drafted[:, None]
    return jnp.where(is_last, prefix_prob[:, 1:], is_accepted), excess


def _prefix_probs(draft_tokens: Array, draft_probs: Array, target_probs: Array) -> Float[Array, "B T"]:
    """Returns ``p_0`` to ``p_G``."""
    token = draft_tokens[..., None]
    target_prob = jnp.take_along_axis(target_probs[:, :-1], token, axis=2)[..., 0]
    draft_prob = jnp.take_along_axis(draft_probs, token, axis=2)[..., 0]
    # Padding may have probability 0 in its distribution; a draft that was drawn has not.
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
