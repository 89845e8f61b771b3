"""The device loop: runs steps without returning to the host."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bass_jax.config import SpecConfig
from bass_jax.decoding.compiled_steps import bucket_spec
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.policy_runner import advance_policy, no_step
from bass_jax.decoding.state import SpecState, StepInfo
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.drafters.protocols import keeps_finished_text, remember_rows
from bass_jax.policies import Policy
from bass_jax.policies.protocol import policy_buckets
from bass_jax.runtime.jit_cache import COMPILER_OPTIONS


@functools.partial(jax.jit, static_argnames=("max_steps",), donate_argnames="state", compiler_options=COMPILER_OPTIONS)
def generate_on_device(
    pair: Pair, state: SpecState, spec: SpecConfig, *, max_steps: int, policy: Policy | None = None
) -> tuple[SpecState, StepInfo]:
    """Runs `bass_jax.speculate_step` until all rows are done, without returning to the host.

    The function is jitted and the state is donated.

    Args:
        pair: target and drafter.
        state: from `bass_jax.prefill`; consumed.
        spec: static.
        max_steps: static; the largest number of steps. ``max_new_tokens`` is always enough.
        policy: chooses draft lengths; None uses ``spec.draft_len``. With a policy the loop contains one step per
            bucket of its lengths, and reports neither token log-probabilities nor draft records.

    Returns:
        ``(state, infos)``. Every field of the infos has an axis of size `max_steps` in front. Steps that were not
        needed have no active row.
    """
    if policy is None:
        policy_state, num_wanted, steps = None, jnp.int32(0), [functools.partial(speculate_step, spec=spec)]
        buckets = (spec.bucket,)
    else:
        policy_state = policy.init(len(state.lengths))
        first = no_step(len(state.lengths))
        policy_state, state, num_wanted = advance_policy(policy, policy_state, state, first)
        buckets = policy_buckets(policy)
        steps = [_bucket_step(spec, bucket, buckets[-1]) for bucket in buckets]
    empty = jax.eval_shape(steps[-1], pair, state)[1]
    infos = jax.tree.map(lambda leaf: jnp.zeros((max_steps, *leaf.shape), leaf.dtype), empty)

    def is_running(carry):
        index, state, *_ = carry
        return (index < max_steps) & ~state.done.all()

    def advance(carry):
        index, state, text, policy_state, num_wanted, infos = carry
        chosen = jnp.searchsorted(jnp.asarray(buckets), num_wanted)
        own = pair
        if keeps_finished_text(pair.drafter):
            own = pair.with_drafter(pair.drafter.with_finished_text(text))
        state, info = jax.lax.switch(chosen, steps, own, state)
        if keeps_finished_text(own.drafter):
            text = remember_rows(own.drafter, state.tokens, state.lengths, info.is_active & state.done)
        if policy is not None:
            policy_state, state, num_wanted = advance_policy(policy, policy_state, state, info)
        write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        infos = jax.tree.map(lambda all_, one: write(all_, one), infos, info)
        return index + 1, state, text, policy_state, num_wanted, infos

    text = pair.drafter.finished_text if keeps_finished_text(pair.drafter) else None
    carry = jnp.int32(0), state, text, policy_state, num_wanted, infos
    _, state, _, _, _, infos = jax.lax.while_loop(is_running, advance, carry)
    return state, infos


def _bucket_step(spec: SpecConfig, bucket: int, largest: int) -> Callable:
    """Returns a step of `bucket` whose info has the shapes of the `largest` bucket."""
    spec = bucket_spec(dataclasses.replace(spec, record_drafts=False, num_logprobs=None), bucket)

    def step(pair: Pair, state: SpecState) -> tuple[SpecState, StepInfo]:
        state, info = (speculate_step if bucket else decode_step)(pair, state, spec)
        padding = ((0, 0), (0, largest - bucket))
        tokens = jnp.pad(info.tokens, padding, constant_values=-1)
        logprobs = jnp.pad(info.logprobs, padding)
        return state, info._replace(tokens=tokens, logprobs=logprobs, width=jnp.int32(bucket + 1))

    return step
