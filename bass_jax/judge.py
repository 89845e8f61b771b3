"""Turns logits and drafts into the tokens of a step: by a rule in jnp, or by the fused kernel where there is one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bass_jax.drafters import Proposal
from bass_jax.sampling import GREEDY, TOKEN, AcceptanceRule, RuleKeys, SamplingControls, make_law
from bass_jax.sampling.law import log_normalizer
from bass_jax.typing import Array, Float
from kernels_pallas import Sampling, ops
from kernels_pallas.targets import current_target


class Judgement(NamedTuple):
    """What each row may emit, before stops and limits."""

    tokens: Array  # [B, T] int32, accepted drafts and the token after them; what follows means nothing
    num_accepted: Array  # [B] int32
    num_finite: Array  # [B] int32, leading tokens that were drawn from finite laws; T + 1 if none failed
    logprobs: Array  # [B, T] float32, of `tokens` under the target's raw law


def judge(
    rule: AcceptanceRule,
    proposal: Proposal,
    logits: Float[Array, "B T V"],
    controls: SamplingControls,
    keys: RuleKeys,
    *,
    kernel: str,
) -> Judgement:
    """Applies `rule`.

    Args:
        rule: the acceptance rule.
        proposal: drafts ``[B, T - 1]``; T may be 1, a regular step.
        logits: of the target.
        controls: per row.
        keys: per row; consumed.
        kernel: ``"pallas"`` runs the greedy and the token rule as `kernels_pallas.ops.masked_acceptance` on a GPU,
            which writes nothing of the size of the vocabulary; ``"xla"`` never does. The tokens are the same.
    """
    if kernel == "pallas" and rule in (GREEDY, TOKEN) and _has_kernel(keys):
        return _by_kernel(rule, proposal, logits, controls, keys)
    law = make_law(logits, controls)
    verdict = rule.judge(proposal.tokens, proposal.num_drafted, proposal.probs, law, keys)
    tokens = _joined(proposal.tokens, verdict.num_accepted, verdict.next_token)
    normalizer = log_normalizer(logits)
    slots = jnp.arange(logits.shape[1])
    num_finite = jnp.where(jnp.isfinite(normalizer), logits.shape[1] + 1, slots).min(axis=1)
    logprobs = jnp.take_along_axis(logits, tokens[..., None], axis=2)[..., 0] - normalizer
    return Judgement(tokens, verdict.num_accepted, num_finite, logprobs)


def _by_kernel(rule, proposal: Proposal, logits, controls: SamplingControls, keys: RuleKeys) -> Judgement:
    if rule is GREEDY:
        controls = controls._replace(temperature=jnp.zeros_like(controls.temperature))
    accept, residual = (jax.random.key_data(key) for key in (keys.accept, keys.residual))
    sampling = Sampling(*map(jnp.asarray, controls))
    verdict = ops.masked_acceptance(
        proposal.tokens, proposal.num_drafted, logits, proposal.probs, accept, residual, sampling
    )
    tokens = _joined(proposal.tokens, verdict.num_accepted, verdict.next_token)
    # A draft whose law is not finite is never accepted, so only the token after the accepted ones can be broken.
    num_finite = jnp.where(verdict.is_valid, logits.shape[1] + 1, verdict.num_accepted)
    return Judgement(tokens, verdict.num_accepted, num_finite, verdict.logprobs)


def _has_kernel(keys: RuleKeys) -> bool:
    """Whether this is traced for a GPU, with keys of the generator that the kernel computes itself."""
    return current_target().platform == "gpu" and str(jax.random.key_impl(keys.residual)) == "threefry2x32"


def _joined(draft_tokens: Array, num_accepted: Array, next_token: Array) -> Array:
    """Puts `next_token` after the accepted drafts, ``[B, T]``."""
    slots = jnp.arange(draft_tokens.shape[1] + 1)
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    return jnp.where(slots < num_accepted[:, None], drafts, next_token[:, None])
