"""The shared-noise rule: the very tokens of regular sampling, whatever drafts."""

import jax.numpy as jnp

from bass_jax.acceptance.base import AcceptanceResult, AcceptanceRule, RuleKeys, register_rule
from bass_jax.acceptance.greedy import leading_run
from bass_jax.sampling.distribution import TokenDistribution, draw
from bass_jax.sampling.keys import gumbel
from bass_jax.typing import Array


def accept(
    draft_tokens: Array, num_drafted: Array, draft_probs: Array | None, target: TokenDistribution, keys: RuleKeys
) -> AcceptanceResult:
    """Draws the target's token at every position with that position's noise; drafts stand while they are equal.

    A drafter that draws with the same noise is equal often: at least ``(1 - TV) / (1 + TV)`` of the time, TV being
    the total variation between the two distributions. One that does not costs acceptance, never exactness.
    """
    del draft_probs
    num_rows, num_positions, vocab_size = target.probs.shape
    noise = gumbel(keys.positions.reshape(-1), vocab_size)
    tokens = draw(target.probs.reshape(-1, vocab_size), noise).reshape(num_rows, num_positions)
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
