"""Steps that are compared with speculation: a synchronized batch, and drafting at every position."""

import jax.numpy as jnp

from bass_jax.config import SpecConfig
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.state import FinishReason, SpecState, StepInfo
from bass_jax.decoding.step import speculate_step
from bass_jax.typing import Array

RULES = ("greedy", "token")
"""Rules that evaluate draft after draft, so that a row may be cut where another one stopped and keep the target's
distribution.
"""


def exhaustive_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Drafts and verifies like `bass_jax.speculate_step`, then commits the first token alone.

    The text follows the target's distribution, one token per step, and ``num_accepted`` says of every position how many
    drafts would have been accepted there. Slow; its infos are what `bass_jax.simulate` replays.
    """
    start = state.lengths
    state, info = speculate_step(pair, state, spec)
    return keep_fewer(pair, state, info, start, 1)


def synchronized_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Drafts and verifies like `bass_jax.speculate_step`, then commits no more per row than its shortest row emits.

    One rejection stops everybody. It is the baseline that ragged batches are an answer to, and nothing else: the
    tokens that other rows had earned are drafted and verified again. Rows that end in this step hold nobody back.

    Raises:
        ValueError: when traced, if the rule looks at later drafts: a cut would then change the distribution.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 3.
    """
    if spec.acceptance not in RULES and not spec.acceptance.startswith("synthetic"):
        raise ValueError(f"acceptance={spec.acceptance!r}: expected one of {RULES} synchronized")
    start = state.lengths
    state, info = speculate_step(pair, state, spec)
    goes_on = info.is_active & (info.finish == FinishReason.RUNNING)
    shortest = jnp.where(goes_on, info.num_emitted, info.tokens.shape[1]).min()
    return keep_fewer(pair, state, info, start, shortest)


def keep_fewer(
    pair: Pair, state: SpecState, info: StepInfo, start: Array, most: Array | int
) -> tuple[SpecState, StepInfo]:
    """Takes back what a step committed past the first `most` tokens of each row.

    Args:
        pair: target and drafter.
        state: after the step.
        info: of the step.
        start: ``[B]`` int32, lengths before the step.
        most: ``[]`` int32, tokens that a row keeps at most.
    """
    num_emitted = jnp.minimum(info.num_emitted, most).astype(jnp.int32)
    # A row that emitted more has met neither its limit nor a stop token in those that it keeps.
    finish = jnp.where(info.num_emitted > most, FinishReason.RUNNING, info.finish).astype(jnp.int32)
    is_kept = jnp.arange(info.tokens.shape[1]) < num_emitted[:, None]
    lengths = start + num_emitted
    info = info._replace(
        tokens=jnp.where(is_kept, info.tokens, -1),
        logprobs=jnp.where(is_kept, info.logprobs, 0.0),
        num_emitted=num_emitted,
        finish=finish,
    )
    drafter = pair.drafter.commit(state.drafter, lengths)
    return state._replace(lengths=lengths, finish=finish, drafter=drafter), info
