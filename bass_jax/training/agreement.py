"""How often a draft proposes its target's token, and how many tokens per target pass that gives."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.drafters.network_drafter import network_drafter
from bass_jax.models import Model
from bass_jax.runtime.cpu_workarounds import argmax
from bass_jax.training.batches import TrainingBatch, single_batches
from bass_jax.training.draft_vocabulary import proposed_ids
from bass_jax.training.init_draft import Draft, reads_target
from bass_jax.training.loss import response_logits
from bass_jax.training.replay_speculation import speculate_on
from bass_jax.training.rollout import Rollout
from bass_jax.typing import Array, Bool, Float, Int


class Agreement(NamedTuple):
    """A draft's agreement with its target's greedy answers."""

    num_tokens: int  # of the answers
    agreement: float  # share of the tokens that the draft would propose, given the answer up to there
    tokens_per_pass: float  # mean tokens per target pass at temperature 0


def accepted_runs(agrees: Bool[np.ndarray, "n"], draft_len: int) -> Int[np.ndarray, "passes"]:
    """Returns how many tokens each target pass of greedy speculation emits.

    Teacher forcing gives the exact number: drafts depend on earlier drafts, but up to the first rejected draft those
    are the target's tokens.

    Args:
        agrees: ``[n]``, whether the draft's most probable token at each position is the target's, given the target's
            tokens before it.
        draft_len: G.

    Returns:
        ``[passes]`` int32 with the sum n: accepted drafts and the bonus token, cut at the end of the answer.
    """
    emitted = []
    position = 0
    while position < len(agrees):
        window = agrees[position : position + draft_len]
        num_accepted = len(window) if window.all() else int(np.argmin(window))
        emitted.append(min(num_accepted + 1, len(agrees) - position))
        position += emitted[-1]
    return np.array(emitted, np.int32)


def measure_agreement(draft: Draft, rollouts: Sequence[Rollout], draft_len: int) -> Agreement:
    """Measures a draft on greedy rollouts of its target.

    For a draft that reads the target's hidden states, `agreement` is that of the first draft of a pass, which reads
    true hidden states. Its tokens per target pass are measured by drafting step by step.

    Raises:
        ValueError: if there is no rollout, one was sampled, or the draft reads hidden states and they are missing.
    """
    if any(rollout.temperature > 0 for rollout in rollouts) or not rollouts:
        raise ValueError("rollouts: expected greedy ones, at least one")
    measured = agreement_of(list(teacher_forced(draft, rollouts)), draft_len)
    if not reads_target(draft):
        return measured
    speculation = speculate_on(network_drafter(draft, draft.config.vocab_size), rollouts, draft_len)
    return measured._replace(tokens_per_pass=speculation.tokens_per_pass)


def agreement_of(matches: Sequence[Bool[np.ndarray, "_"]], draft_len: int) -> Agreement:
    """Computes the agreement from where the drafts are the target's tokens, one array per answer."""
    num_passes = sum(len(accepted_runs(agrees, draft_len)) for agrees in matches)
    flat = np.concatenate(list(matches))
    return Agreement(len(flat), float(flat.mean()), len(flat) / num_passes)


def teacher_forced(draft: Draft, rollouts: Sequence[Rollout]) -> Iterator[Bool[np.ndarray, "n"]]:
    """Yields, per rollout, where the draft's most probable token is the answer's, given the answer up to there."""
    ids = proposed_ids(draft)
    for rollout, batch in zip(rollouts, single_batches(rollouts, draft), strict=True):
        predicted = jax.device_get(_predict(draft, batch))
        yield ids[predicted[: len(rollout.response)]] == rollout.response


@jax.jit
def _predict(draft: Draft, batch: TrainingBatch) -> Int[Array, "M"]:
    return argmax(response_logits(draft, batch))


def sampled_acceptance(draft: Draft, target: Model, rollouts: Sequence[Rollout]) -> float:
    """Returns the mean of ``sum_x min(p(x), q(x))`` over the positions of sampled answers.

    This is the probability that the acceptance rule of Leviathan et al. (2023) accepts a draft. p and q are the full
    distributions of target and draft at the temperature of the answer, given the answer up to there.

    Args:
        draft: the draft.
        target: its target.
        rollouts: of the target, at temperatures above 0.

    Raises:
        ValueError: if there is no rollout, or one is greedy.
    """
    if not rollouts or any(not rollout.temperature > 0 for rollout in rollouts):
        raise ValueError("rollouts: expected sampled ones, at least one")
    ids = jnp.asarray(proposed_ids(draft))
    total, num = 0.0, 0
    for rollout, batch in zip(rollouts, single_batches(rollouts, draft), strict=True):
        overlap = _overlap(draft, target, batch, ids, jnp.float32(rollout.temperature))
        total += float(np.asarray(overlap)[: len(rollout.response)].sum())
        num += len(rollout.response)
    return total / num


@jax.jit
def _overlap(
    draft: Draft, target: Model, batch: TrainingBatch, ids: Int[Array, "O"], temperature: Float[Array, ""]
) -> Float[Array, "M"]:
    """Returns ``sum_x min(p(x), q(x))`` at each response position."""
    p, q = (jax.nn.softmax(response_logits(model, batch) / temperature, axis=-1) for model in (target, draft))
    return jnp.minimum(p[:, ids], q).sum(axis=-1)
