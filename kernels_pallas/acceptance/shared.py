"""Operations on `[B, G]` arrays that all implementations of masked acceptance share."""

import jax
import jax.numpy as jnp

from kernels_pallas.acceptance.random_bits import uniform_at
from kernels_pallas.acceptance.types import AcceptanceInputs, KernelAcceptance, TargetDistribution


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """Returns `1 / temperature`; 1 where the temperature is 0."""
    return jnp.where(temperature > 0, 1.0 / jnp.where(temperature > 0, temperature, 1.0), 1.0)


def kept_weight(
    logits: jax.Array, peak: jax.Array, threshold: jax.Array, inverse: jax.Array, min_p: jax.Array | float
) -> jax.Array:
    """Returns float32 `exp((x - peak) / temperature)` for tokens that every filter keeps, and 0 for the others."""
    weight = jnp.exp((logits - peak) * inverse)
    # The most probable token has weight 1, so min-p is compared with the weight itself.
    return jnp.where((logits >= threshold) & (weight >= min_p), weight, 0.0)


def count_accepted(inputs: AcceptanceInputs, distribution: TargetDistribution) -> jax.Array:
    """Returns the `[B]` int32 length of the accepted prefix of the drafts.

    Draft g is accepted with probability `min(1, target_prob / draft_prob)` (Leviathan et al. 2023, algorithm 1). A
    draft of target probability 0 is never accepted, and NaN in either probability rejects.
    """
    draft_tokens, sampling = inputs.draft_tokens, inputs.sampling
    num_slots = draft_tokens.shape[1]
    index = jnp.arange(num_slots, dtype=jnp.uint32)[None, :]
    uniform = uniform_at((inputs.accept_keys[:, :1], inputs.accept_keys[:, 1:]), index)
    weight = kept_weight(
        gather_tokens(inputs.target_logits[:, :num_slots], draft_tokens),
        distribution.peak[:, :-1],
        distribution.threshold[:, :-1],
        inverse_temperature(sampling.temperature)[:, None],
        sampling.min_p[:, None],
    )
    target_prob = weight / distribution.total[:, :-1]
    draft_prob = 1.0 if inputs.draft_probs is None else gather_tokens(inputs.draft_probs, draft_tokens)
    is_accepted = (target_prob > 0) & (uniform * draft_prob <= target_prob)
    is_greedy = sampling.temperature[:, None] <= 0
    is_accepted = jnp.where(is_greedy, draft_tokens == distribution.mode[:, :-1], is_accepted)
    is_accepted &= jnp.isfinite(distribution.log_normalizer[:, :-1])
    is_end = ~is_accepted | (index >= inputs.num_drafted[:, None])
    position = jnp.where(is_end, index.astype(jnp.int32), num_slots)
    return position.min(axis=1, initial=num_slots)


def build_result(
    inputs: AcceptanceInputs,
    distribution: TargetDistribution,
    num_accepted: jax.Array,
    sampled_token: jax.Array,
    is_sampled: jax.Array,
) -> KernelAcceptance:
    """Selects the next token and looks up the log-probability of every emitted token.

    Args:
        inputs: The op's arguments.
        distribution: The target's distributions.
        num_accepted: `[B]` int32.
        sampled_token: `[B]` int32 token sampled at position `num_accepted`; greedy rows use the mode instead.
        is_sampled: `[B]` bool: False if the distribution of `sampled_token` was invalid.
    """
    batch, num_positions, _ = inputs.target_logits.shape
    is_greedy = inputs.sampling.temperature <= 0
    normalizer = at_position(distribution.log_normalizer, num_accepted)
    is_valid = jnp.isfinite(normalizer) & (is_greedy | is_sampled)
    next_token = jnp.where(is_greedy, at_position(distribution.mode, num_accepted), sampled_token)
    next_token = jnp.where(is_valid, next_token, 0)

    position = jnp.arange(num_positions)
    tokens = jnp.concatenate([inputs.draft_tokens, jnp.zeros((batch, 1), jnp.int32)], axis=1)
    tokens = jnp.where(position == num_accepted[:, None], next_token[:, None], tokens)
    logprobs = gather_tokens(inputs.target_logits, tokens) - distribution.log_normalizer
    is_emitted = position < (num_accepted + is_valid)[:, None]
    return KernelAcceptance(num_accepted, next_token, jnp.where(is_emitted, logprobs, 0.0), is_valid)


def gather_tokens(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns `values[b, g, tokens[b, g]]` as `[B, G]` float32; tokens are clipped to the vocabulary."""
    tokens = jnp.clip(tokens, 0, values.shape[-1] - 1)
    return jnp.take_along_axis(values, tokens[..., None], axis=2)[..., 0].astype(jnp.float32)


def at_position(values: jax.Array, position: jax.Array) -> jax.Array:
    """Returns `values[b, position[b]]`."""
    return jnp.take_along_axis(values, position[:, None], axis=1)[:, 0]
