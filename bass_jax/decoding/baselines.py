"""Steps to compare with speculation: synchronized rows, and exhaustive drafting."""

import jax.numpy as jnp

from bass_jax.acceptance import find_rule
from bass_jax.config import SpecConfig
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.state import FinishReason, SpecState, StepInfo
from bass_jax.decoding.step import draft_and_verify, finish_step
from bass_jax.typing import Array

RULES = ("greedy", "token")
"""Rules that accept draft by draft. A row can be cut after any of its tokens and keeps the target's distribution."""


def exhaustive_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Drafts and verifies like `bass_jax.speculate_step`, and commits only the first token.

    ``info.num_accepted`` therefore holds, for every position of the text, how many drafts would be accepted there.
    `bass_jax.analysis.replay.make_replay` uses this to replay other draft lengths. The text follows the target's
    distribution.
    """
    start = state.lengths
    state, info = draft_and_verify(pair, state, spec)
    return finish_step(pair, start, *keep_fewer(state, info, start, 1))


def synchronized_step(pair: Pair, state: SpecState, spec: SpecConfig) -> tuple[SpecState, StepInfo]:
    """Drafts and verifies like `bass_jax.speculate_step`; all rows advance by the minimum of their emitted tokens.

    This is the baseline that BASS compares ragged batches with. The tokens past the minimum are drafted and verified
    again. Rows that finish in this step do not count for the minimum.

    Raises:
        ValueError: during tracing, if the rule's decision on a draft depends on later drafts, because a cut would then
            change the distribution.

    Source: Qian et al. 2024 (BASS, arXiv 2404.15778), section 3.
    """
    name = find_rule(spec.acceptance).name
    if name not in RULES and not name.startswith("synthetic"):
        raise ValueError(f"acceptance={name!r}: expected one of {RULES} for the synchronized baseline")
    start = state.lengths
    state, info = draft_and_verify(pair, state, spec)
    is_running = info.is_active & (info.finish == FinishReason.RUNNING)
    fewest = jnp.where(is_running, info.num_emitted, info.tokens.shape[1]).min()
    return finish_step(pair, start, *keep_fewer(state, info, start, fewest))


def keep_fewer(state: SpecState, info: StepInfo, start: Array, most: Array | int) -> tuple[SpecState, StepInfo]:
    """Removes the tokens of a step past the first `most` of each row, before the step is finished.

    Args:
        state: after the tokens were appended.
        info: of the step.
        start: ``[B]`` int32, lengths before the step.
        most: ``[]`` int32, the largest number of tokens that a row keeps.
    """
    num_emitted = jnp.minimum(info.num_emitted, most).astype(jnp.int32)
    # If a row emitted more tokens, the ones that it keeps include neither a stop token nor the last one of its limit.
    finish = jnp.where(info.num_emitted > most, FinishReason.RUNNING, info.finish).astype(jnp.int32)
    is_kept = jnp.arange(info.tokens.shape[1]) < num_emitted[:, None]
    lengths = start + num_emitted
    info = info._replace(
        tokens=jnp.where(is_kept, info.tokens, -1),
        logprobs=jnp.where(is_kept, info.logprobs, 0.0),
        num_emitted=num_emitted,
        finish=finish,
    )
    return state._replace(lengths=lengths, finish=finish), info
