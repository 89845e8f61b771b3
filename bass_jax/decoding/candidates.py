"""Several chains of drafts per row, checked by one pass of the target."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance import AcceptanceRule, RuleKeys, registered_rules
from bass_jax.acceptance.base import MultiDraftAcceptanceResult, check_acceptance
from bass_jax.config import SpecConfig
from bass_jax.decoding.accept import StepTokens, TargetLogits, describe
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.positions import input_positions, join_tokens, last_tokens, with_drafts
from bass_jax.decoding.state import SpecState
from bass_jax.drafters import MultiDraftDrafter, Proposal, reads_hidden_states
from bass_jax.models.kv_cache import KVCache, keep_candidate
from bass_jax.sampling import LogitsProcessors, TokenDistribution, token_distribution
from bass_jax.typing import Array, Int


def check_candidates(pair: Pair, spec: SpecConfig, rule: AcceptanceRule) -> None:
    """Raises a `ValueError` if rule or drafter know one chain alone."""
    if rule.accept_candidates is None:
        able = sorted(name for name, other in registered_rules().items() if other.accept_candidates is not None)
        raise ValueError(
            f"num_candidates={spec.num_candidates}: acceptance={rule.name!r} evaluates one chain; expected one of {able}"
        )
    if not isinstance(pair.drafter, MultiDraftDrafter):
        name = type(pair.drafter).__name__
        raise ValueError(f"num_candidates={spec.num_candidates}: {name} has no propose_many and proposes one chain")
    if reads_hidden_states(pair.drafter):
        name = type(pair.drafter).__name__
        raise ValueError(f"num_candidates={spec.num_candidates}: {name} reads the target's hidden states, of one chain")


def verify_candidates(
    pair: Pair,
    state: SpecState,
    spec: SpecConfig,
    rule: AcceptanceRule,
    proposal: Proposal,
    processors: LogitsProcessors,
    keys: RuleKeys,
) -> tuple[StepTokens, Int[Array, "B"], KVCache]:
    """Scores all chains in one pass, evaluates them, and keeps the cache of the one that stands.

    Args:
        pair: whose target scores.
        state: the rows.
        spec: static.
        rule: one with `accept_candidates`.
        proposal: every field with M after B.
        processors: the logits processors.
        keys: consumed.

    Returns:
        The result of the chain that stands, the drafts of each row's longest chain, and the target's cache.
    """
    B, M, G = proposal.tokens.shape
    rows = jnp.arange(B)
    # A chain without drafts still scores the root, as every chain does: the rule reads it wherever it likes.
    num_inputs = jnp.where(state.done[:, None], 0, proposal.num_drafted + 1)
    positions = input_positions(state.lengths, G + 1, num_inputs, state.target_cache.capacity)
    with jax.named_scope("verify"):
        roots = jnp.broadcast_to(last_tokens(state)[:, None, None], (B, M, 1))
        inputs = jnp.concatenate([roots, proposal.tokens], axis=2)
        assert isinstance(state.target_cache, KVCache)  # pages are an engine's, which refuses chains
        raw, cache, new = pair.target.forward_candidates(inputs, positions, state.target_cache)
    with jax.named_scope("accept"):
        processed = raw
        if not processors.is_identity:
            of_candidate = [
                processors(raw[:, index], with_drafts(state, proposal.tokens[:, index]), state.lengths)
                for index in range(M)
            ]
            processed = jnp.stack(of_candidate, axis=1)
        flat = token_distribution(processed.reshape(B, M * (G + 1), -1), state.sampling_arrays)
        distribution = TokenDistribution(flat.probs.reshape(raw.shape), flat.argmax.reshape(B, M, G + 1))
        assert rule.accept_candidates is not None  # `check_candidates` saw to it
        result = rule.accept_candidates(proposal.tokens, proposal.num_drafted, proposal.probs, distribution, keys)
        result = check_acceptance(rule, result, MultiDraftAcceptanceResult, proposal.num_drafted, raw.shape[-1])
        candidate = result.candidate
        tokens = join_tokens(proposal.tokens[rows, candidate], result.num_accepted, result.next_token)
        raw_kept = raw[rows, candidate]
        logits = TargetLogits(raw_kept, raw_kept if processed is raw else processed[rows, candidate])
        kept_distribution = TokenDistribution(distribution.probs[rows, candidate], distribution.argmax[rows, candidate])
        step_tokens = describe(tokens, result.num_accepted, logits, kept_distribution, spec.num_logprobs)
    cache = keep_candidate(cache, new, candidate, positions[rows, candidate])
    return step_tokens, proposal.num_drafted.max(axis=1), cache
