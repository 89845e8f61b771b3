"""The distribution that tokens are drawn from, made by one function for the target and for every draft.

What is sampled and what enters an acceptance ratio are the same array, so they cannot disagree: other
decoders sampled after top-p and returned the logits from before it, or sampled in bfloat16 and accepted
in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.runtime import cpu_workarounds
from bass_jax.sampling.params import SamplingArrays
from bass_jax.typing import Array, Float, Int


class TokenDistribution(NamedTuple):
    """The distribution of the token after each position.

    Both fields are lazy under `jax.jit`: a rule that reads `argmax` alone costs no softmax.
    """

    probs: Array  # [..., V] float32, sums to 1; one-hot at temperature 0
    argmax: Array  # [...] int32, most probable token; the first of equals


def token_distribution(logits: Float[Array, "B T V"], sampling_arrays: SamplingArrays) -> TokenDistribution:
    """Warps `logits`: temperature, then top-k, top-p and min-p, in float32.

    Sets that tie at a threshold are kept whole. Thresholds are found by bisection on the bits of the
    logits, at most 32 passes over V instead of a sort, and none where a control is off.

    Args:
        logits: ``[B, T, V]``.
        sampling_arrays: per row; `bass_jax.sampling.logits_processors.LogitsProcessors` has processed the logits
            before.

    Returns:
        A `TokenDistribution` over ``[B, T]``. A row whose logits hold NaN has an undefined distribution: see
        `is_finite`.
    """
    logits = logits.astype(jnp.float32)
    argmax = cpu_workarounds.argmax(logits)
    temperature, top_k, top_p, min_p = (jnp.asarray(control)[:, None, None] for control in sampling_arrays[:4])
    # Subnormal temperatures count as 0: devices flush them. The maximum is taken off first, since a logit over a
    # tiny temperature overflows and inf - inf is NaN.
    is_greedy = temperature < jnp.finfo(jnp.float32).tiny
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(is_greedy, 1.0, temperature)
    weights = jnp.exp(scaled)
    order = _ordered_bits(scaled)

    wants_top_k = (top_k > 0) & ~is_greedy
    kept = order >= _threshold(order, jnp.ones_like(weights), top_k.astype(jnp.float32), wants_top_k)
    weights = jnp.where(kept, weights, 0.0)

    wants_top_p = (top_p < 1) & ~is_greedy
    mass = top_p * weights.sum(axis=-1, keepdims=True)
    kept = order >= _threshold(order, weights, mass, wants_top_p)
    weights = jnp.where(kept, weights, 0.0)

    # The maximum of `weights` is exp(0) = 1, whatever was dropped.
    weights = jnp.where(weights >= min_p, weights, 0.0)
    probs = weights / weights.sum(axis=-1, keepdims=True)
    one_hot = jax.nn.one_hot(argmax, logits.shape[-1], dtype=jnp.float32)
    return TokenDistribution(probs=jnp.where(is_greedy, one_hot, probs), argmax=argmax)


def draw(probs: Float[Array, "B V"], gumbel: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Draws one token per row by Gumbel-max; a token of probability 0 is never drawn.

    `probs` need not sum to 1.
    """
    scores = jnp.where(probs > 0, jnp.log(probs) + gumbel, -jnp.inf)
    return cpu_workarounds.argmax(scores)


def log_normalizer(logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Returns log-sum-exp; NaN where the logits hold NaN or +inf, or nothing but -inf.

    These are looked for one by one: in a fused step on a CPU (jax 0.12.0.1) the log-sum-exp of NaN came out finite
    about once in a hundred runs, and a token was emitted from no distribution.
    """
    logits = logits.astype(jnp.float32)
    largest = logits.max(axis=-1)
    exists = ~jnp.isnan(logits).any(axis=-1) & (largest < jnp.inf) & (largest > -jnp.inf)
    total = jnp.exp(logits - jnp.where(exists, largest, 0.0)[..., None]).sum(axis=-1)
    return jnp.where(exists, largest + jnp.log(total), jnp.nan)


def _ordered_bits(values: Float[Array, "..."]) -> Array:
    """Maps float32 to uint32 so that integers order as the floats do."""
    # -0 and 0 are equals.
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: Array, weights: Array, needed: Array, is_wanted: Array) -> Array:
    """Finds the largest `t` with ``weights[order >= t].sum() >= needed``, and at most the maximum.

    Args:
        order: ``[B, T, V]`` uint32.
        weights: ``[B, T, V]`` float32, not negative.
        needed: ``[B, 1, 1]`` or ``[B, T, 1]`` float32.
        is_wanted: ``[B, 1, 1]``; elsewhere the threshold is 0, which keeps everything.

    Returns:
        ``[B, T, 1]`` uint32.
    """
    highest = order.max(axis=-1, keepdims=True)
    low = jnp.zeros_like(highest)
    high = jnp.where(is_wanted, highest, low)

    def is_open(bounds):
        return (bounds[0] < bounds[1]).any()

    def halve(bounds):
        low, high = bounds
        # From above, so that no bounds overflow: a GPU's NaN orders as 2**32 - 1.
        middle = high - (high - low) // 2
        is_enough = jnp.where(order >= middle, weights, 0.0).sum(axis=-1, keepdims=True) >= needed
        # Where the bounds have met, `middle` is both of them and neither moves.
        return jnp.where(is_enough, middle, low), jnp.where(is_enough | (low == high), high, middle - 1)

    return jax.lax.while_loop(is_open, halve, (low, high))[0]
