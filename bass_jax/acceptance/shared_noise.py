"""The shared-noise rule: emits exactly the tokens of regular sampling with the same key, for every drafter."""

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, leading_run, register_rule
from bass_jax.sampling.distribution import TokenDistribution, sample_tokens
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Samples the target's token at every position with the position's key, and accepts the drafts that are equal.

    A draft sampled with the same Gumbel noise is equal with a probability of at least ``(1 - TV) / (1 + TV)``, where TV
    is the total variation distance between the two distributions. With other noise fewer drafts are accepted, and the
    emitted tokens are the same.
    """
    del draft_probs
    num_rows, num_positions, vocab_size = target.probs.shape
    noise = gumbel(keys.positions.reshape(-1), vocab_size)
    tokens = sample_tokens(target.probs.reshape(-1, vocab_size), noise).reshape(num_rows, num_positions)
    num_accepted = leading_run(draft_tokens == tokens[:, :-1], num_drafted)
    return AcceptanceResult(num_accepted, jnp.take_along_axis(tokens, num_accepted[:, None], axis=1)[:, 0])


SHARED_NOISE = register_rule(
    AcceptanceRule(
        name="shared_noise",
        accept=accept,
        lossless=True,
        noise="position",
        source="Daliri, Musco, Suresh 2025 (arXiv 2408.07978): drafter-invariant speculation",
    )
)
