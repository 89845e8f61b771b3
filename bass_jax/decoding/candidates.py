"""Several candidate drafts per row (multi-draft speculation), verified in one pass of the target."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance import AcceptanceRule, RuleKeys, registered_rules
from bass_jax.acceptance.base import MultiDraftAcceptanceResult, check_acceptance
from bass_jax.config import SpecConfig
from bass_jax.decoding.accept import StepTokens, TargetLogits, with_logprobs
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.positions import input_positions, join_tokens, last_tokens, with_drafts
from bass_jax.decoding.state import SpecState
from bass_jax.drafters import MultiDraftDrafter, Proposal, reads_hidden_states
from bass_jax.models.kv_cache import KVCache, PagedCache, keep_candidate
from bass_jax.models.protocol import CandidateModel
from bass_jax.sampling import LogitsProcessors, TokenDistribution, token_distribution
from bass_jax.typing import Array, Int


def check_candidates(pair: Pair, spec: SpecConfig, rule: AcceptanceRule) -> None:
    """Checks that the rule and the drafter support several candidates.

    Raises:
        ValueError: if one of them does not.
    """
    if spec.num_candidates == 1:
        return
    found, drafter = f"num_candidates={spec.num_candidates}", type(pair.drafter).__name__
    if rule.accept_candidates is None:
        able = sorted(name for name, other in registered_rules().items() if other.accept_candidates is not None)
        raise ValueError(f"{found}: expected 1 with acceptance={rule.name!r}, or one of the rules {able}")
    if not isinstance(pair.target, CandidateModel):
        raise ValueError(f"{found}: expected 1, because {type(pair.target).__name__} has no forward_candidates")
    if not isinstance(pair.drafter, MultiDraftDrafter):
        raise ValueError(f"{found}: expected 1, because {drafter} has no propose_many")
    if reads_hidden_states(pair.drafter):
        raise ValueError(f"{found}: expected 1, because {drafter} reads the target's hidden states")


def verify_candidates(
    pair: Pair,
    state: SpecState,
    spec: SpecConfig,
    rule: AcceptanceRule,
    proposal: Proposal,
    processors: LogitsProcessors,
    keys: RuleKeys,
) -> tuple[StepTokens, Int[Array, "B"], KVCache | PagedCache]:
    """Verifies all candidates in one pass, and keeps the cache of the accepted one.

    Args:
        pair: target and drafter.
        state: the batch.
        spec: static.
        rule: a rule with `accept_candidates`.
        proposal: every field has an axis of size M after B.
        processors: the logits processors.
        keys: consumed.

    Returns:
        The tokens of the accepted candidates, the number of drafts of each row's longest candidate, and the target's
        cache.
    """
    B, M, G = proposal.tokens.shape
    rows = jnp.arange(B)
    # Every candidate includes the last committed token, because the rule reads the first position of any of them.
    num_inputs = jnp.where(state.done[:, None], 0, proposal.num_drafted + 1)
    positions = input_positions(state.lengths, G + 1, num_inputs, state.tokens.shape[1])
    with jax.named_scope("verify"):
        last = jnp.broadcast_to(last_tokens(state)[:, None, None], (B, M, 1))
        inputs = jnp.concatenate([last, proposal.tokens], axis=2)
        assert isinstance(pair.target, CandidateModel), "check_candidates refuses other targets"
        output = pair.target.forward_candidates(inputs, positions, state.target_cache)
    with jax.named_scope("accept"):
        processed = raw = output.logits
        if not processors.is_identity:
            candidates = [
                processors(raw[:, index], with_drafts(state, proposal.tokens[:, index]), state.lengths)
                for index in range(M)
            ]
            processed = jnp.stack(candidates, axis=1)
        flat = token_distribution(processed.reshape(B, M * (G + 1), -1), state.sampling_arrays)
        distribution = TokenDistribution(flat.probs.reshape(raw.shape), flat.argmax.reshape(B, M, G + 1))
        assert rule.accept_candidates is not None
        result = rule.accept_candidates(proposal.tokens, proposal.num_drafted, proposal.probs, distribution, keys)
        result = check_acceptance(rule, result, MultiDraftAcceptanceResult, proposal.num_drafted, raw.shape[-1])
        candidate = result.candidate
        tokens = join_tokens(proposal.tokens[rows, candidate], result.num_accepted, result.next_token)
        raw_kept = raw[rows, candidate]
        logits = TargetLogits(raw_kept, raw_kept if processed is raw else processed[rows, candidate])
        kept_distribution = TokenDistribution(distribution.probs[rows, candidate], distribution.argmax[rows, candidate])
        step_tokens = with_logprobs(tokens, result.num_accepted, logits, kept_distribution, spec.num_logprobs)
    cache = keep_candidate(output.cache, output.candidates, candidate, positions[rows, candidate])
    return step_tokens, proposal.num_drafted.max(axis=1), cache
