"""One step of a batch: speculative decoding, and regular decoding as its baseline. Both are pure and not jitted."""

from typing import Any

import jax
import jax.numpy as jnp

from bass_jax.acceptance import GREEDY, TOKEN, AcceptanceRule, RuleKeys, find_rule
from bass_jax.acceptance.base import leading_run
from bass_jax.config import SpecConfig
from bass_jax.decoding.accept import StepTokens, TargetLogits, accept, require_greedy
from bass_jax.decoding.candidates import check_candidates, verify_candidates
from bass_jax.decoding.draft_records import record_drafts
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.positions import input_positions, last_tokens, with_drafts
from bass_jax.decoding.state import FinishReason, SpecState, StepInfo
from bass_jax.drafters import DraftContext, Proposal, borrows_cache, reads_hidden_states
from bass_jax.drafters.protocols import check_proposal, check_proposal_values, hidden_layers_of
from bass_jax.models.mesh import replicate_on_mesh
from bass_jax.models.protocol import commit_pass, forward, require_hidden
from bass_jax.sampling import LogitsProcessors, find_processors
from bass_jax.sampling.keys import Role, draw_keys, position_keys, step_draft_keys
from bass_jax.typing import Array, Int, Key


def speculate_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Drafts, verifies, accepts and commits.

    Every running row emits its accepted drafts and one token more: 1 to ``spec.draft_len + 1`` tokens, up to a stop
    token. An invalid distribution of the target ends the row before its token. Rows do not wait for each other.

    Jit it with the state donated, ``jax.jit(speculate_step, donate_argnames="state")``, so that the caches are updated
    in place. It is compiled once per `spec`, batch size and capacity.

    Args:
        pair: target and drafter.
        state: from `bass_jax.prefill` or the last step.
        spec: static.

    Returns:
        ``(state, info)``. The new state differs in its tokens, lengths, finish reasons, step counts, cache and drafter
        state. Rejected drafts leave entries in the caches that no later pass reads; see `SpecState`.

    Raises:
        ValueError: during tracing, if `spec` names an unknown rule or logits processor, if the rule or the drafter
            does not support the number of candidates, or if they return arrays of another type or shape.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 3: ragged batched speculation.
    """
    return finish_step(pair, state.lengths, *draft_and_verify(pair, state, spec))


def draft_and_verify(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Runs `speculate_step` up to the new lengths; `finish_step` then brings the caches to these lengths."""
    rule = find_rule(spec.acceptance)
    is_active = ~state.done
    # The state holds what each row wants, the static `spec.draft_len` limits it, and the arrays have the width of
    # `spec.bucket`. A step emits one token more than it accepts, so a row drafts one token less than it may still emit.
    room = state.limits - state.lengths - 1
    num_wanted = jnp.clip(jnp.minimum(state.draft_lens, room), 0, spec.num_drafts)
    num_wanted = jnp.where(is_active, num_wanted, 0)
    processors = _processors(state, spec)

    with jax.named_scope("draft"):
        proposal, drafter_state, target_cache = _propose(pair, state, spec, rule, num_wanted, processors)
        state = state._replace(target_cache=target_cache)
    accept_keys, residual_keys = (draw_keys(state.keys, state.num_steps, role) for role in (Role.ACCEPT, Role.RESIDUAL))
    keys = RuleKeys(accept_keys, residual_keys, position_keys(state.keys, state.lengths, spec.bucket + 1))
    record = None
    # Several candidates, unless nothing is drafted; no drafter of them reads hidden states.
    if proposal.tokens.ndim == 3:
        step_tokens, num_drafted, target_cache = verify_candidates(pair, state, spec, rule, proposal, processors, keys)
    else:
        num_drafted = proposal.num_drafted
        with jax.named_scope("verify"):
            inputs = jnp.concatenate([last_tokens(state)[:, None], proposal.tokens], axis=1)
            num_inputs = jnp.where(is_active, num_drafted + 1, 0)
            raw, target_cache, drafter_state = _verify(pair, state, drafter_state, inputs, num_inputs)
        with jax.named_scope("accept"):
            tokens = state.tokens if processors.is_identity else with_drafts(state, proposal.tokens)
            logits = TargetLogits(raw, processors(raw, tokens, state.lengths))
            step_tokens = accept(rule, proposal, logits, state.sampling_arrays, keys, spec)
            if spec.record_drafts:  # From the keys of the rule, to record its own random numbers.
                record = record_drafts(proposal, logits.processed, state.sampling_arrays, keys)
    if rule.is_deterministic:
        step_tokens = require_greedy(step_tokens, state.sampling_arrays)
    with jax.named_scope("commit"):
        state = state._replace(target_cache=target_cache, drafter_state=drafter_state)
        state, info = _append(state, step_tokens, num_drafted)
        return state, info._replace(draft_record=record)


def finish_step(pair: Pair, start: Int[Array, "B"], state: SpecState, info: StepInfo) -> tuple[SpecState, StepInfo]:
    """Commits the tokens of a step: brings both caches to the new lengths.

    Args:
        pair: target and drafter.
        start: lengths before the step.
        state: with the new lengths.
        info: returned.
    """
    with jax.named_scope("commit"):
        target_cache = commit_pass(pair.target, state.target_cache, state.lengths - start)
        # The new lengths roll the drafter back to the committed tokens.
        drafter_state = pair.drafter.commit(state.drafter_state, state.lengths)
        return replicate_on_mesh((state._replace(target_cache=target_cache, drafter_state=drafter_state), info))


def decode_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Regular decoding: every running row emits one token, sampled from the target's distribution.

    Signature, caches and info are those of `speculate_step`. The drafter is not run; it catches up in its next step.
    The token is sampled with the key of its absolute position. With a deterministic rule (``"greedy"``) it is the most
    probable token, and no distribution is computed.
    """
    # Without drafts the token rule samples from the target's distribution.
    rule = GREEDY if find_rule(spec.acceptance).is_deterministic else TOKEN
    proposal = _no_drafts(state)
    inputs, num_inputs = last_tokens(state)[:, None], (~state.done).astype(jnp.int32)
    raw, target_cache, drafter_state = _verify(pair, state, state.drafter_state, inputs, num_inputs)
    logits = TargetLogits(raw, _processors(state, spec)(raw, state.tokens, state.lengths))
    positions = position_keys(state.keys, state.lengths, 1)
    keys = RuleKeys(accept=positions[:, 0], residual=positions[:, 0], positions=positions)
    step_tokens = accept(rule, proposal, logits, state.sampling_arrays, keys, spec)
    if rule is GREEDY:
        step_tokens = require_greedy(step_tokens, state.sampling_arrays)
    start = state.lengths
    state = state._replace(target_cache=target_cache, drafter_state=drafter_state)
    state, info = _append(state, step_tokens, proposal.num_drafted)
    target_cache = commit_pass(pair.target, state.target_cache, state.lengths - start)
    return replicate_on_mesh((state._replace(target_cache=target_cache), info))


def _propose(
    pair: Pair,
    state: SpecState,
    spec: SpecConfig,
    rule: AcceptanceRule,
    num_wanted: Int[Array, "B"],
    processors: LogitsProcessors,
) -> tuple[Proposal, Any, Any]:
    """Runs the drafter. With several candidates every field of the proposal has an axis of size M after B.

    Returns:
        The proposal, the drafter's state, and the target's cache, in which a drafter that borrows it has written.
    """
    drafter_state, cache = state.drafter_state, state.target_cache
    if spec.bucket == 0:
        return _no_drafts(state), drafter_state, cache
    if borrows_cache(pair.drafter):
        drafter_state = pair.drafter.borrow(drafter_state, cache, state.lengths)
    keys = _draft_keys(state, rule, spec.bucket)
    min_confidence = state.min_confidence
    if min_confidence is None and spec.record_drafts:  # A threshold of 0 reports the confidence and stops no row.
        min_confidence = jnp.zeros(num_wanted.shape, jnp.float32)
    context = DraftContext(
        state.tokens, state.lengths, num_wanted, state.sampling_arrays, keys, processors, min_confidence
    )
    is_sampled = not rule.is_deterministic
    if spec.num_candidates == 1:
        proposal, drafter_state = pair.drafter.propose(drafter_state, context, spec.bucket, is_sampled=is_sampled)
    else:
        check_candidates(pair, spec, rule)
        multi_drafter: Any = pair.drafter
        proposal, drafter_state = multi_drafter.propose_many(
            drafter_state, context, spec.bucket, spec.num_candidates, is_sampled=is_sampled
        )
        num_wanted = num_wanted[:, None]
    if borrows_cache(pair.drafter):
        drafter_state, cache = pair.drafter.give_back(drafter_state, cache)
    shape = keys.shape if spec.num_candidates == 1 else (keys.shape[0], spec.num_candidates, keys.shape[1])
    check_proposal(pair.drafter, proposal, shape, pair.target.vocab_size)
    check_proposal_values(pair.drafter, proposal, num_wanted, pair.target.vocab_size)
    # Clip the proposal: a faulty drafter may return more tokens than requested, ids outside the vocabulary, or tokens
    # of probability 0.
    is_draft = (proposal.tokens >= 0) & (proposal.tokens < pair.target.vocab_size)
    if proposal.probs is not None:
        is_draft &= jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=-1)[..., 0] > 0
    num_drafted = leading_run(is_draft, jnp.minimum(proposal.num_drafted, num_wanted))
    proposal = proposal._replace(tokens=proposal.tokens.astype(jnp.int32), num_drafted=num_drafted)
    return proposal, drafter_state, cache


def _verify(pair: Pair, state: SpecState, drafter_state: Any, inputs: Int[Array, "B T"], num_inputs: Int[Array, "B"]):
    """Runs the target on `inputs`, which follow the cached prefix; inputs past `num_inputs` are padding.

    Returns:
        The logits, the target's cache and the drafter's state after it observed the hidden states.
    """
    positions = input_positions(state.lengths, inputs.shape[1], num_inputs, state.tokens.shape[1])
    output = forward(pair.target, inputs, positions, state.target_cache, hidden_layers_of(pair.drafter))
    if reads_hidden_states(pair.drafter):
        drafter_state = pair.drafter.observe(drafter_state, require_hidden(pair.target, output), positions)
    return output.logits, output.cache, drafter_state


def _processors(state: SpecState, spec: SpecConfig) -> LogitsProcessors:
    functions = find_processors(spec.logits_processors)
    return LogitsProcessors(state.sampling_arrays.processor_arrays, state.prompt_lengths, state.stop_tokens, functions)


def _append(state: SpecState, step_tokens: StepTokens, num_drafted: Int[Array, "B"]) -> tuple[SpecState, StepInfo]:
    """Appends ``num_accepted + 1`` tokens per running row, up to the first stop token and the limit."""
    is_active = ~state.done
    tokens, num_accepted = step_tokens.tokens, step_tokens.num_accepted
    offsets = jnp.arange(tokens.shape[1])
    is_stop = (tokens[..., None] == state.stop_tokens[:, None]).any(axis=-1)
    until_stop = jnp.where(is_stop, offsets + 1, tokens.shape[1]).min(axis=1)
    # The limit is a safeguard: a step drafts no more than a row may still emit.
    num_due = jnp.minimum(jnp.minimum(num_accepted + 1, until_stop), state.limits - state.lengths)
    # As in regular decoding, an invalid distribution ends the row after the tokens before it. Those of padding are past
    # `num_due`.
    has_failed = step_tokens.num_valid < num_due
    num_emitted = jnp.where(is_active, jnp.minimum(num_due, step_tokens.num_valid), 0).astype(jnp.int32)
    is_emitted = offsets < num_emitted[:, None]
    lengths = state.lengths + num_emitted

    finish = jnp.where(lengths >= state.limits, FinishReason.LENGTH, FinishReason.RUNNING)
    finish = jnp.where((is_stop & is_emitted).any(axis=1), FinishReason.STOP, finish)
    finish = jnp.where(has_failed, step_tokens.failure, finish)
    finish = jnp.where(is_active, finish, state.finish).astype(jnp.int32)

    capacity = state.tokens.shape[1]
    rows = jnp.arange(tokens.shape[0])[:, None]
    # Indices past the end are dropped. They differ, because unique_indices=True requires it.
    columns = jnp.where(is_emitted, state.lengths[:, None] + offsets, capacity + offsets)
    info = StepInfo(
        is_active=is_active,
        tokens=jnp.where(is_emitted, tokens, -1),
        num_emitted=num_emitted,
        num_accepted=jnp.where(is_active, num_accepted, 0),
        num_drafted=jnp.where(is_active, num_drafted, 0),
        logprobs=jnp.where(is_emitted, step_tokens.logprobs, 0.0),
        finish=finish,
        token_logprobs=step_tokens.token_logprobs,
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


def _draft_keys(state: SpecState, rule: AcceptanceRule, num_drafts: int) -> Key[Array, "B G"]:
    """Returns the keys of the drafts: by step, or by absolute position for a rule with shared noise."""
    if rule.noise == "position":
        return position_keys(state.keys, state.lengths, num_drafts)
    return step_draft_keys(state.keys, state.num_steps, num_drafts)
