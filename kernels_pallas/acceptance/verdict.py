"""What masked acceptance takes and gives, and the operations on `[B, G]` that its implementations share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.acceptance import noise


class KernelSampling(NamedTuple):
    """How each row's target distribution is warped, in this order; all traced."""

    temperature: jax.Array
    """`[B]` float32 divisor of the logits; 0 takes the most probable token."""
    top_k: jax.Array
    """`[B]` int32 number of most probable tokens kept, with all ties of the last; 0 keeps all."""
    top_p: jax.Array
    """`[B]` float32: the smallest set of most probable tokens of at least this mass is kept, with ties; 1
    keeps all."""
    min_p: jax.Array
    """`[B]` float32: tokens at least this fraction as probable as the most probable are kept; 0 keeps all."""


class KernelAcceptance(NamedTuple):
    """The result on each row's drafts."""

    num_accepted: jax.Array
    """`[B]` int32 drafts that stand, from the first."""
    next_token: jax.Array
    """`[B]` int32 token after them: of the residual distribution after a rejection, else of the target's (the
    bonus)."""
    logprobs: jax.Array
    """`[B, G + 1]` float32 log-probability of every emitted token (the accepted drafts, then the next token)
    under the target's distribution before warping; 0 past them."""
    is_valid: jax.Array
    """`[B]` bool, false where the distribution that the next token comes from holds NaN or +inf, or nothing but -inf.
    The next token is then 0 and means nothing; the accepted drafts before it do stand."""


class TargetDistribution(NamedTuple):
    """A warped distribution without its V probabilities: `exp((x - peak) / temperature) / total` of the kept logits
    x.
    """

    peak: jax.Array
    """`[B, G + 1]` float32 largest logit."""
    mode: jax.Array
    """`[B, G + 1]` int32 first token that has it."""
    log_normalizer: jax.Array
    """`[B, G + 1]` float32 log-sum-exp of the raw logits; not finite for a distribution that is none."""
    threshold: jax.Array
    """`[B, G + 1]` float32 logit below which top-k or top-p drop a token; -inf where none."""
    total: jax.Array
    """`[B, G + 1]` float32 sum over the kept tokens of `exp((x - peak) / temperature)`."""


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """`1 / temperature`, and 1 for a greedy row, whose distribution is its mode whatever this says."""
    return jnp.where(temperature > 0, 1.0 / jnp.where(temperature > 0, temperature, 1.0), 1.0)


def kept_weight(
    logits: jax.Array, peak: jax.Array, threshold: jax.Array, inverse: jax.Array, min_p: jax.Array | float
) -> jax.Array:
    """`exp((x - peak) / temperature)` of the tokens that every filter keeps, 0 of the others; all float32."""
    weight = jnp.exp((logits - peak) * inverse)
    # The most probable token weighs exactly 1.
    return jnp.where((logits >= threshold) & (weight >= min_p), weight, 0.0)


def count_accepted(
    draft_tokens: jax.Array,
    num_drafted: jax.Array,
    target_logits: jax.Array,
    draft_probs: jax.Array | None,
    accept_keys: jax.Array,
    distribution: TargetDistribution,
    sampling: KernelSampling,
) -> jax.Array:
    """The leading drafts that stand: draft g does with probability `min(1, target_prob / draft_prob)`.

    Leviathan et al. 2023, algorithm 1. A draft of target probability 0 never stands; NaN on either side
    rejects.

    Args:
        draft_tokens: `[B, G]` int32 in `0 ... V - 1`.
        num_drafted: `[B]` int32 in `0 ... G`.
        target_logits: `[B, G + 1, V]`.
        draft_probs: `[B, G, V]`, or None for a one-hot distribution.
        accept_keys: `[B, 2]` uint32.
        distribution: The target's.
        sampling: Its warping.

    Returns:
        `[B]` int32.
    """
    num_slots = draft_tokens.shape[1]
    index = jnp.arange(num_slots, dtype=jnp.uint32)[None, :]
    uniform = noise.uniform((accept_keys[:, :1], accept_keys[:, 1:]), index)
    logits = gather_tokens(target_logits[:, :num_slots], draft_tokens)
    inverse = inverse_temperature(sampling.temperature)[:, None]
    weight = kept_weight(
        logits, distribution.peak[:, :-1], distribution.threshold[:, :-1], inverse, sampling.min_p[:, None]
    )
    target_prob = weight / distribution.total[:, :-1]
    draft_prob = 1.0 if draft_probs is None else gather_tokens(draft_probs, draft_tokens)
    is_accepted = (target_prob > 0) & (uniform * draft_prob <= target_prob)
    is_greedy = sampling.temperature[:, None] <= 0
    is_accepted = jnp.where(is_greedy, draft_tokens == distribution.mode[:, :-1], is_accepted)
    is_accepted &= jnp.isfinite(distribution.log_normalizer[:, :-1])
    is_last = ~is_accepted | (index >= num_drafted[:, None])
    position = jnp.where(is_last, index.astype(jnp.int32), num_slots)
    return position.min(axis=1, initial=num_slots)


def conclude(
    draft_tokens: jax.Array,
    target_logits: jax.Array,
    distribution: TargetDistribution,
    sampling: KernelSampling,
    num_accepted: jax.Array,
    drawn_token: jax.Array,
    is_drawn: jax.Array,
) -> KernelAcceptance:
    """Puts the result together: greedy rows take the mode, and every emitted token gets its log-probability.

    Args:
        draft_tokens: `[B, G]` int32.
        target_logits: `[B, G + 1, V]`.
        distribution: The target's.
        sampling: Its warping.
        num_accepted: `[B]` int32.
        drawn_token: `[B]` int32 token drawn at position `num_accepted`; not used in greedy rows.
        is_drawn: `[B]` bool, whether there was a distribution to draw it from.

    Returns:
        The result.
    """
    batch, num_positions, _ = target_logits.shape
    is_greedy = sampling.temperature <= 0
    normalizer = at_position(distribution.log_normalizer, num_accepted)
    is_valid = jnp.isfinite(normalizer) & (is_greedy | is_drawn)
    next_token = jnp.where(is_greedy, at_position(distribution.mode, num_accepted), drawn_token)
    next_token = jnp.where(is_valid, next_token, 0)

    position = jnp.arange(num_positions)
    tokens = jnp.concatenate([draft_tokens, jnp.zeros((batch, 1), jnp.int32)], axis=1)
    tokens = jnp.where(position == num_accepted[:, None], next_token[:, None], tokens)
    logprobs = gather_tokens(target_logits, tokens) - distribution.log_normalizer
    is_emitted = position < (num_accepted + is_valid)[:, None]
    return KernelAcceptance(num_accepted, next_token, jnp.where(is_emitted, logprobs, 0.0), is_valid)


def gather_tokens(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """`values[b, g, tokens[b, g]]` as `[B, G]` float32; a token out of range reads the nearest one in range."""
    tokens = jnp.clip(tokens, 0, values.shape[-1] - 1)
    return jnp.take_along_axis(values, tokens[..., None], axis=2)[..., 0].astype(jnp.float32)


def at_position(values: jax.Array, position: jax.Array) -> jax.Array:
    """`values[b, position[b]]`."""
    return jnp.take_along_axis(values, position[:, None], axis=1)[:, 0]
