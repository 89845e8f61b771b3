"""The inputs and results of masked acceptance."""

from typing import NamedTuple

import jax


class KernelSampling(NamedTuple):
    """Sampling parameters per row, traced; applied to the target's logits in this order."""

    temperature: jax.Array
    """`[B]` float32 divisor of the logits; 0 selects the most probable token."""
    top_k: jax.Array
    """`[B]` int32: keep the k most probable tokens, and all ties of the last one; 0 keeps all."""
    top_p: jax.Array
    """`[B]` float32: keep the smallest set of most probable tokens of at least this mass, with ties; 1 keeps all."""
    min_p: jax.Array
    """`[B]` float32: keep tokens at least this fraction as probable as the most probable one; 0 keeps all."""


class AcceptanceInputs(NamedTuple):
    """The arrays of one call, checked and with counts in range; see `kernels_pallas.ops.masked_acceptance`."""

    draft_tokens: jax.Array
    """`[B, G]` int32."""
    num_drafted: jax.Array
    """`[B]` int32 in `0 ... G`."""
    target_logits: jax.Array
    """`[B, G + 1, V]` float32, bfloat16 or float16."""
    draft_probs: jax.Array | None
    """`[B, G, V]` floating point; None if the draft distributions are one-hot."""
    accept_keys: jax.Array
    """`[B, 2]` uint32."""
    residual_keys: jax.Array
    """`[B, 2]` uint32."""
    sampling: KernelSampling


class KernelAcceptance(NamedTuple):
    """The result of masked acceptance."""

    num_accepted: jax.Array
    """`[B]` int32 length of the accepted prefix of the drafts."""
    next_token: jax.Array
    """`[B]` int32 token after the accepted drafts, from the residual distribution after a rejection and from the
    target's distribution otherwise."""
    logprobs: jax.Array
    """`[B, G + 1]` float32 log-probability of every emitted token (the accepted drafts, then the next token) under
    the target's softmax, before the sampling parameters; 0 past the emitted tokens."""
    is_valid: jax.Array
    """`[B]` bool: False if the distribution of the next token contains NaN or +inf, or only -inf. The next token is
    then 0 and must not be used; the accepted drafts before it are valid."""


class TargetDistribution(NamedTuple):
    """Processed distributions: a kept token with logit x has probability `exp((x - peak) / temperature) / total`."""

    peak: jax.Array
    """`[B, G + 1]` float32 largest logit."""
    mode: jax.Array
    """`[B, G + 1]` int32 first token with the largest logit."""
    log_normalizer: jax.Array
    """`[B, G + 1]` float32 log-sum-exp of the raw logits; not finite if they define no distribution."""
    threshold: jax.Array
    """`[B, G + 1]` float32: top-k and top-p drop tokens with smaller logits; -inf drops none."""
    total: jax.Array
    """`[B, G + 1]` float32 sum of `exp((x - peak) / temperature)` over the kept tokens."""
