"""Several chains of drafts per row, checked by one pass of the target."""

import jax
import jax.numpy as jnp

from bass_jax.acceptance import AcceptanceRule, RuleKeys, registered_rules
from bass_jax.acceptance.base import ChainVerdict, check_verdict
from bass_jax.config import SpecConfig
from bass_jax.decoding.accept import Judgement, TargetLogits, describe
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.positions import input_positions, join_tokens, last_tokens, with_drafts
from bass_jax.decoding.state import SpecState
from bass_jax.drafters import Proposal, reads_features
from bass_jax.models.kv_cache import KVCache, keep_chain
from bass_jax.sampling import Adjuster, Law, make_law
from bass_jax.typing import Array, Int


def check_chains(pair: Pair, spec: SpecConfig, rule: AcceptanceRule) -> None:
    """Raises a `ValueError` if rule or drafter know one chain alone."""
    if rule.judge_chains is None:
        able = sorted(name for name, other in registered_rules().items() if other.judge_chains is not None)
        raise ValueError(
            f"num_chains={spec.num_chains}: acceptance={rule.name!r} judges one chain; expected one of {able}"
        )
    if not hasattr(pair.drafter, "propose_chains"):
        name = type(pair.drafter).__name__
        raise ValueError(f"num_chains={spec.num_chains}: {name} has no propose_chains and proposes one chain")
    if reads_features(pair.drafter):
        name = type(pair.drafter).__name__
        raise ValueError(f"num_chains={spec.num_chains}: {name} reads the target's features, of one chain")


def verify_chains(
    pair: Pair,
    state: SpecState,
    spec: SpecConfig,
    rule: AcceptanceRule,
    proposal: Proposal,
    adjuster: Adjuster,
    keys: RuleKeys,
) -> tuple[Judgement, Int[Array, "B"], KVCache]:
    """Scores all chains in one pass, judges them, and keeps the cache of the one that stands.

    Args:
        pair: whose target scores.
        state: the rows.
        spec: static.
        rule: one with `judge_chains`.
        proposal: every field with M after B.
        adjuster: of the logits.
        keys: consumed.

    Returns:
        The judgement of the chain that stands, the drafts of each row's longest chain, and the target's cache.
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
        raw, cache, new = pair.target.forward_chains(inputs, positions, state.target_cache)
    with jax.named_scope("accept"):
        adjusted = raw
        if not adjuster.is_identity:
            of_chain = [
                adjuster(raw[:, index], with_drafts(state, proposal.tokens[:, index]), state.lengths)
                for index in range(M)
            ]
            adjusted = jnp.stack(of_chain, axis=1)
        flat = make_law(adjusted.reshape(B, M * (G + 1), -1), state.controls)
        law = Law(flat.probs.reshape(raw.shape), flat.mode.reshape(B, M, G + 1))
        assert rule.judge_chains is not None  # `check_chains` saw to it
        verdict = rule.judge_chains(proposal.tokens, proposal.num_drafted, proposal.probs, law, keys)
        verdict = check_verdict(rule, verdict, ChainVerdict, proposal.num_drafted, raw.shape[-1])
        chain = verdict.chain
        tokens = join_tokens(proposal.tokens[rows, chain], verdict.num_accepted, verdict.next_token)
        raw_kept = raw[rows, chain]
        logits = TargetLogits(raw_kept, raw_kept if adjusted is raw else adjusted[rows, chain])
        kept_law = Law(law.probs[rows, chain], law.mode[rows, chain])
        judgement = describe(tokens, verdict.num_accepted, logits, kept_law, spec.num_logprobs)
    cache = keep_chain(cache, new, chain, positions[rows, chain])
    return judgement, proposal.num_drafted.max(axis=1), cache
