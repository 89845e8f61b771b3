"""How often a draft would have said what its target said, and what that is worth in target passes."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from bass_jax.drafters import EagleDrafter
from bass_jax.models import Model
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.training.batches import Batch, single_batches
from bass_jax.training.draft_vocabulary import proposed_ids
from bass_jax.training.loss import scored_logits
from bass_jax.training.replay_speculation import speculate_on
from bass_jax.training.rollout import Rollout
from bass_jax.typing import Array, Bool, Int, Params


class Agreement(NamedTuple):
    """Of a draft with its target's greedy outputs.

    Attributes:
        num_tokens: the target's tokens.
        agreement: share that the draft, given the target's own prefix, would have drafted.
        block_efficiency: mean tokens per target pass at temperature 0.
    """

    num_tokens: int
    agreement: float
    block_efficiency: float


def accepted_runs(agrees: Bool[np.ndarray, "n"], draft_len: int) -> Int[np.ndarray, "passes"]:
    """Tokens that each target pass of greedy speculation emits.

    Exact from teacher forcing: drafts are conditioned on earlier drafts, but up to the first that is
    rejected those *are* the target's tokens.

    Args:
        agrees: ``[n]``: whether the draft's choice at each position is the target's, given the target's
            prefix.
        draft_len: G.

    Returns:
        ``[passes]`` int32 that sum to n: accepted drafts and the bonus token, cut at the end.
    """
    emitted = []
    position = 0
    while position < len(agrees):
        window = agrees[position : position + draft_len]
        accepted = len(window) if window.all() else int(np.argmin(window))
        emitted.append(min(accepted + 1, len(agrees) - position))
        position += emitted[-1]
    return np.array(emitted, np.int32)


def measure_agreement(draft: Model, rollouts: Sequence[Rollout], draft_len: int) -> Agreement:
    """Measures a draft on greedy rollouts of its target.

    A draft that reads the target's hidden states has the true ones for its first draft alone; its block efficiency is
    that of drafting step by step.

    Raises:
        ValueError: if there is no rollout, one was sampled, or hidden states are missing that the draft reads.
    """
    if any(rollout.temperature > 0 for rollout in rollouts) or not rollouts:
        raise ValueError("rollouts: expected greedy ones, at least one")
    measured = agreement_of(list(teacher_forced(draft, rollouts)), draft_len)
    if draft.config.hidden_width is None:
        return measured
    speculation = speculate_on(EagleDrafter(draft, draft.config.vocab_size), rollouts, draft_len)
    return measured._replace(block_efficiency=speculation.block_efficiency)


def agreement_of(matches: Sequence[Bool[np.ndarray, "_"]], draft_len: int) -> Agreement:
    """Sums up where drafts were the target's tokens, answer by answer."""
    passes = sum(len(accepted_runs(agrees, draft_len)) for agrees in matches)
    flat = np.concatenate(list(matches))
    return Agreement(len(flat), float(flat.mean()), len(flat) / passes)


def teacher_forced(draft: Model, rollouts: Sequence[Rollout]) -> Iterator[Bool[np.ndarray, "n"]]:
    """Yields, per rollout, where the draft's most probable token is the response's, given what precedes it."""
    ids = proposed_ids(draft)
    for rollout, batch in zip(rollouts, single_batches(rollouts, draft), strict=True):
        predicted = jax.device_get(_predict(draft.config, draft.params, batch))
        yield ids[predicted[: len(rollout.response)]] == rollout.response


@functools.partial(jax.jit, static_argnums=0)
def _predict(config: ModelConfig, params: Params, batch: Batch) -> Int[Array, "M"]:
    return argmax(scored_logits(config, params, batch))
