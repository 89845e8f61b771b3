"""One step of a batch: speculative, and regular as its baseline; both pure, neither jitted here."""

from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.config import SpecConfig
from bass_jax.drafters import DraftContext, Proposal
from bass_jax.judge import Judgement, judge
from bass_jax.pair import Pair
from bass_jax.records import record_drafts
from bass_jax.sampling import GREEDY, TOKEN, AcceptanceRule, RuleKeys, find_rule
from bass_jax.sampling.greedy import leading_run
from bass_jax.sampling.keys import Role, draw_keys, position_keys, step_draft_keys
from bass_jax.state import FinishReason, SpecState, StepInfo
from bass_jax.typing import Array, Int, Key


def speculate_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Drafts, verifies, accepts and commits: every running row emits 1 to ``G + 1`` tokens.

    Pure; jit it with the state donated, ``jax.jit(speculate_step, donate_argnames="state")``, and the caches
    are updated in place. One executable serves a bucket of draft length, batch and capacity.

    Args:
        pair: target and drafter.
        state: from `bass_jax.prefill` or the step before.
        spec: static.

    Returns:
        ``(state, info)``.

    Raises:
        ValueError: when traced, if `spec` names an unknown rule.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 3: ragged batched speculation.
    """
    rule = find_rule(spec.acceptance)
    is_active = ~state.done
    # A step emits one token more than it accepts: what the limit leaves no room for is not drafted.
    room = state.limits - state.lengths - 1
    num_wanted = jnp.clip(jnp.minimum(state.draft_lens, room), 0, spec.draft_len)
    num_wanted = jnp.where(is_active, num_wanted, 0)

    with jax.named_scope("draft"):
        proposal, drafter = _propose(pair, state, spec, rule, num_wanted)
    with jax.named_scope("verify"):
        inputs = jnp.concatenate([_last_tokens(state)[:, None], proposal.tokens], axis=1)
        logits, target_cache = _verify(pair, state, inputs, jnp.where(is_active, proposal.num_drafted + 1, 0))
    with jax.named_scope("accept"):
        accept, residual = (draw_keys(state.keys, state.num_steps, role) for role in (Role.ACCEPT, Role.RESIDUAL))
        keys = RuleKeys(accept, residual, position_keys(state.keys, state.lengths, inputs.shape[1]))
        judgement = judge(rule, proposal, logits, state.controls, keys, kernel=spec.acceptance_kernel)
    with jax.named_scope("commit"):
        controls = state.controls
        state, info = _commit(state._replace(target_cache=target_cache), judgement, proposal.num_drafted)
        if spec.record_drafts:
            info = info._replace(drafts=record_drafts(proposal, logits, controls, keys))
        return state._replace(drafter=pair.drafter.commit(drafter, state.lengths)), info


def decode_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Regular decoding: every running row emits one token, drawn from the target's law.

    Same signature, caches and info as `speculate_step`; the drafter is not asked, and catches up when it is.
    The noise is that of the row's absolute position. With a rule that needs no noise (``"greedy"``) the token is
    the most probable one, and no law is computed.
    """
    # Without drafts the token rule is a draw from the target's law.
    rule = GREEDY if find_rule(spec.acceptance).noise == "none" else TOKEN
    proposal = _no_drafts(state)
    logits, target_cache = _verify(pair, state, _last_tokens(state)[:, None], (~state.done).astype(jnp.int32))
    positions = position_keys(state.keys, state.lengths, 1)
    keys = RuleKeys(accept=positions[:, 0], residual=positions[:, 0], positions=positions)
    judgement = judge(rule, proposal, logits, state.controls, keys, kernel=spec.acceptance_kernel)
    return _commit(state._replace(target_cache=target_cache), judgement, proposal.num_drafted)


def _propose(
    pair: Pair, state: SpecState, spec: SpecConfig, rule: AcceptanceRule, num_wanted: Int[Array, "B"]
) -> tuple[Proposal, Any]:
    if spec.bucket == 0:
        return _no_drafts(state), state.drafter
    keys = _draft_keys(state, rule, spec.bucket)
    min_confidence = state.min_confidence
    if min_confidence is None and spec.record_drafts:  # Of 0: reported, and never in the way.
        min_confidence = jnp.zeros(num_wanted.shape, jnp.float32)
    context = DraftContext(state.tokens, state.lengths, num_wanted, state.controls, keys, min_confidence)
    proposal, drafter = pair.drafter.propose(state.drafter, context, spec.bucket, is_sampled=rule.noise != "none")
    # A drafter's word is not taken for it: more drafts than wanted would overrun the row's limit, and an id outside
    # the vocabulary (-1 as a placeholder) would be read as another token's.
    is_token = (proposal.tokens >= 0) & (proposal.tokens < pair.target.config.vocab_size)
    num_drafted = leading_run(is_token, jnp.minimum(proposal.num_drafted, num_wanted))
    return proposal._replace(num_drafted=num_drafted), drafter


def _verify(pair: Pair, state: SpecState, inputs: Int[Array, "B T"], num_inputs: Int[Array, "B"]):
    """Scores `inputs`, which follow the cached prefix; those past `num_inputs` write nothing."""
    slots = jnp.arange(inputs.shape[1])
    positions = state.lengths[:, None] - 1 + slots
    is_real = slots < num_inputs[:, None]
    positions = jnp.where(is_real, positions, state.target_cache.capacity)
    return pair.target.forward(inputs, positions, state.target_cache)


def _commit(state: SpecState, judgement: Judgement, num_drafted: Int[Array, "B"]) -> tuple[SpecState, StepInfo]:
    """Appends ``num_accepted + 1`` tokens per running row, cut after the first stop token and at the limit."""
    is_active = ~state.done
    tokens, num_accepted = judgement.tokens, judgement.num_accepted
    slots = jnp.arange(tokens.shape[1])
    is_stop = (tokens[..., None] == state.stop_tokens[:, None]).any(axis=-1)
    until_stop = jnp.where(is_stop, slots + 1, tokens.shape[1] + 1).min(axis=1)
    num_due = jnp.minimum(jnp.minimum(num_accepted + 1, until_stop), state.limits - state.lengths)
    # A law that is not finite ends the row where it is drawn from: the tokens before it stand, as in regular decoding.
    is_broken = judgement.num_finite < num_due
    num_emitted = jnp.where(is_active, jnp.minimum(num_due, judgement.num_finite), 0).astype(jnp.int32)
    is_emitted = slots < num_emitted[:, None]
    lengths = state.lengths + num_emitted

    finish = jnp.where(lengths >= state.limits, FinishReason.LENGTH, FinishReason.RUNNING)
    finish = jnp.where((is_stop & is_emitted).any(axis=1), FinishReason.STOP, finish)
    finish = jnp.where(is_broken, FinishReason.NOT_FINITE, finish)
    finish = jnp.where(is_active, finish, state.finish).astype(jnp.int32)

    capacity = state.tokens.shape[1]
    rows = jnp.arange(tokens.shape[0])[:, None]
    # Distinct slots past the end are dropped.
    columns = jnp.where(is_emitted, state.lengths[:, None] + slots, capacity + slots)
    info = StepInfo(
        is_active=is_active,
        tokens=jnp.where(is_emitted, tokens, -1),
        num_emitted=num_emitted,
        num_accepted=jnp.where(is_active, num_accepted, 0),
        num_drafted=jnp.where(is_active, num_drafted, 0),
        logprobs=jnp.where(is_emitted, judgement.logprobs, 0.0),
        finish=finish,
    )
    state = state._replace(
        tokens=state.tokens.at[rows, columns].set(tokens, mode="drop", unique_indices=True),
        lengths=lengths,
        finish=finish,
        num_steps=state.num_steps + is_active,
    )
    return state, info


def _no_drafts(state: SpecState) -> Proposal:
    empty = jnp.zeros((state.lengths.shape[0], 0), jnp.int32)
    return Proposal(empty, jnp.zeros_like(state.lengths), probs=None)


def _last_tokens(state: SpecState) -> Int[Array, "B"]:
    return jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]


def _draft_keys(state: SpecState, rule: AcceptanceRule, num_drafts: int) -> Key[Array, "B G"]:
    """Noise of the drafts: the step's own, or that of the positions where a rule shares it."""
    if rule.noise == "position":
        return position_keys(state.keys, state.lengths, num_drafts)
    return step_draft_keys(state.keys, state.num_steps, num_drafts)
