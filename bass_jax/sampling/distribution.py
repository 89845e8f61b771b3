"""The distribution that tokens are sampled from, computed by one function for the target and for every draft model.

The array that is sampled from is also the array that enters the acceptance ratio, so the two cannot differ. Two known
bugs of other decoders are thereby excluded: sampling after top-p but accepting with the logits before it, and sampling
in bfloat16 but accepting in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.runtime import cpu_workarounds
from bass_jax.sampling.params import SamplingArrays
from bass_jax.typing import Array, Float, Int
from kernels_pallas.acceptance.threshold import bits_at


class TokenDistribution(NamedTuple):
    """The distribution of the token after each position.

    Under `jax.jit`, a rule that reads only `argmax` computes no softmax, because XLA removes what is not used.
    """

    probs: Array  # [..., V] float32, sums to 1; one-hot at temperature 0
    argmax: Array  # [...] int32, most probable token; the first one if several are equal


def token_distribution(logits: Float[Array, "B T V"], sampling_arrays: SamplingArrays) -> TokenDistribution:
    """Applies temperature, top-k, top-p and min-p, in this order and in float32.

    The result is called the *warped* distribution, and the softmax of the model's own logits the *raw* distribution.
    Tokens that are equal to the last one kept are kept too. Thresholds are found by bisection instead of a sort. This
    mostly takes 5 to 20 passes over V, at most 32, and none for a setting that is off.

    Args:
        logits: ``[B, T, V]``, processed by `bass_jax.sampling.logits_processors.LogitsProcessors`.
        sampling_arrays: per row.

    Returns:
        A `TokenDistribution` over ``[B, T]``; undefined where the logits contain NaN, see `log_normalizer`.
    """
    logits = logits.astype(jnp.float32)
    argmax = cpu_workarounds.argmax(logits)
    temperature, top_k, top_p, min_p = (jnp.asarray(values)[:, None, None] for values in sampling_arrays[:4])
    # A subnormal temperature counts as 0, because devices flush it to 0. The maximum is subtracted before the division:
    # a logit divided by a tiny temperature overflows, and inf - inf is NaN.
    is_greedy = temperature < jnp.finfo(jnp.float32).tiny
    largest = logits.max(axis=-1, keepdims=True)

    def scale(logits):
        return (logits - largest) / jnp.where(is_greedy, 1.0, temperature)

    def kept_tokens(logits):
        scaled = scale(logits)
        weights = jnp.exp(scaled)
        threshold = jnp.full_like(largest, -jnp.inf)
        threshold = _threshold(scaled, None, top_k.astype(jnp.float32), (top_k > 0) & ~is_greedy, threshold)
        mass = jnp.where(scaled < threshold, 0.0, weights).sum(axis=-1, keepdims=True)
        threshold = _threshold(scaled, weights, top_p * mass, (top_p < 1) & ~is_greedy, threshold)
        # The largest weight is always exp(0) = 1.
        return ~((scaled < threshold) | (weights < min_p))

    is_truncated = (((top_k > 0) | (top_p < 1) | (min_p > 0)) & ~is_greedy).any()
    is_kept = cpu_workarounds.call_if(is_truncated, kept_tokens, logits, otherwise=jnp.ones(logits.shape, bool))
    weights = jnp.exp(jnp.where(is_kept, scale(logits), -jnp.inf))
    probs = weights / weights.sum(axis=-1, keepdims=True)
    one_hot = jax.nn.one_hot(argmax, logits.shape[-1], dtype=jnp.float32)
    return TokenDistribution(probs=jnp.where(is_greedy, one_hot, probs), argmax=argmax)


def sample_tokens(probs: Float[Array, "B V"], gumbel: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Samples one token per row with the Gumbel-max trick; a token of probability 0 is never sampled.

    `probs` need not sum to 1.
    """
    scores = jnp.where(probs > 0, jnp.log(probs) + gumbel, -jnp.inf)
    return cpu_workarounds.argmax(scores)


def log_normalizer(logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Returns log-sum-exp, or NaN where no distribution exists: NaN or +inf among the logits, or all of them -inf.

    The cases are tested explicitly. In a fused step on a CPU (jax 0.12.0.1) the log-sum-exp of NaN was finite in about
    one of a hundred runs, so a token was emitted although there was no distribution.
    """
    logits = logits.astype(jnp.float32)
    largest = logits.max(axis=-1)
    exists = ~jnp.isnan(logits).any(axis=-1) & (largest < jnp.inf) & (largest > -jnp.inf)
    total = jnp.exp(logits - jnp.where(exists, largest, 0.0)[..., None]).sum(axis=-1)
    return jnp.where(exists, largest + jnp.log(total), jnp.nan)


def _threshold(values: Array, weights: Array | None, needed: Array, is_wanted: Array, lowest: Array) -> Array:
    """Returns the largest of `values` at or above which the weights add up to at least `needed`.

    A pass halves the interval between two bounds, as integers, and moves a bound on to the next one of `values`.
    Where few values lie near the threshold, few passes are needed.

    Args:
        values: ``[B, T, V]`` float32, at most 0.
        weights: ``[B, T, V]`` float32, not negative; None if all are 1.
        needed: ``[B, 1, 1]`` or ``[B, T, 1]`` float32.
        is_wanted: ``[B, 1, 1]``.
        lowest: ``[B, T, 1]`` float32, the result for other rows, and if the weights at or above it add up to less.

    Returns:
        ``[B, T, 1]`` float32.
    """
    low = _ordered_bits(lowest)
    high = jnp.where(is_wanted, _ordered_bits(jnp.float32(0)), low)

    def as_float(order):
        return jax.lax.bitcast_convert_type(bits_at(order), jnp.float32)

    def is_open(bounds):
        return (bounds[0] < bounds[1]).any()

    def narrow(bounds):
        low, high = bounds
        middle = high - (high - low) // 2
        is_above = values >= as_float(middle)
        ones, zeros, largest = (jnp.full_like(values, x) for x in (1, 0, jnp.finfo(jnp.float32).max))
        # XLA for a CPU computes this in one loop that reads the values once. With three reductions, with infinities
        # in place of the largest numbers or with scalars in `jnp.where`, it takes four times as long.
        mass, above, below = jax.lax.reduce(
            (
                jax.lax.select(is_above, ones if weights is None else weights, zeros),
                jax.lax.select(is_above, values, largest),
                jax.lax.select(is_above, -largest, values),
            ),
            (np.float32(0), np.finfo(np.float32).max, np.finfo(np.float32).min),
            lambda one, other: (one[0] + other[0], jnp.minimum(one[1], other[1]), jnp.maximum(one[2], other[2])),
            (values.ndim - 1,),
        )
        is_enough = mass[..., None] >= needed
        # NaN among the values must not keep the bounds from meeting.
        above = jnp.maximum(_ordered_bits(above[..., None]), middle)
        below = jnp.minimum(_ordered_bits(below[..., None]), middle - 1)
        # Where the bounds are equal, they stay as they are.
        return jnp.where(is_enough, jnp.minimum(above, high), low), jnp.where(is_enough | (low == high), high, below)

    return as_float(jax.lax.while_loop(is_open, narrow, (low, high))[0])


def _ordered_bits(values: Float[Array, "..."]) -> Array:
    """Maps float32 to uint32 so that the integers have the order of the floats."""
    # -0 and 0 have different bits and must be equal.
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
