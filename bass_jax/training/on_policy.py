"""Training batches in which the draft writes the answers and the target scores them.

Source: Agarwal et al. 2024 (GKD, arXiv 2306.13649).
"""

import functools
from typing import Any

import jax
import numpy as np

from bass_jax.models import Model
from bass_jax.training.batches import TrainingBatch, make_batch, pad_sequences
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.rollout import Rollout, roll_out, sequence_hidden, top_distribution
from bass_jax.training.training_checkpoints import TrainPosition
from bass_jax.typing import Array, Int

_CHUNK = 256


def on_policy_batch(
    config: DistillConfig,
    batch: TrainingBatch,
    position: TrainPosition,
    draft: Any,
    target: Model,
    columns: Int[np.ndarray, "V"],
) -> TrainingBatch:
    """Returns `batch`, or in a share of the cases its prompts with answers of the draft.

    The result depends only on these arguments. A training that was killed therefore continues with the same batches.

    Args:
        config: the share of the batches, and the temperatures of the answers.
        batch: of the corpus; the draft's answers are not longer than the target's.
        position: of the batch.
        draft: with its current parameters.
        target: scores the answers.
        columns: ``[V]``, output column of every token.
    """
    generator = np.random.default_rng((config.seed, position.epoch, position.batch))
    if generator.random() >= config.training.on_policy_share:
        return batch
    num_rows, length = batch.tokens.shape
    prompts, limits = _prompts(batch)
    written = roll_out(
        draft,
        prompts,
        temperatures=[config.rollout.draw_temperature(generator.random()) for _ in prompts],
        key=jax.random.key(int(generator.integers(1 << 31))),
        max_new_tokens=max(limits),
        stop_ids=(),
        top=min(config.rollout.top, len(np.unique(columns)) - 1),
    )
    answers = [row._replace(response=row.response[:limit]) for row, limit in zip(written, limits, strict=True)]
    scored = score_answers(target, answers, config.rollout.top, length)
    return make_batch(scored, columns, length, len(batch.weights), num_rows)


def score_answers(target: Model, rollouts: list[Rollout], top: int, length: int) -> list[Rollout]:
    """Replaces the distributions of answers by the target's.

    Args:
        target: the target.
        rollouts: answers of any model.
        top: number of most probable tokens.
        length: sequences are padded to this.
    """
    tokens, lengths = pad_sequences([row.inputs for row in rollouts], len(rollouts), length)
    hidden = sequence_hidden(target, tokens, lengths)
    scored = []
    for index, row in enumerate(rollouts):
        first, count = len(row.prompt) - 1, len(row.response)
        chunks = np.zeros((-(-count // _CHUNK), _CHUNK, hidden.shape[-1]), np.float32)
        chunks.reshape(-1, hidden.shape[-1])[:count] = hidden[index, first : first + count]
        parts = [jax.device_get(_distribution(target, chunk, top)) for chunk in chunks]
        ids, logprobs = (np.concatenate(part)[:count] for part in zip(*parts, strict=True))
        scored.append(row._replace(distribution_ids=ids, distribution_logprobs=logprobs))
    return scored


def _prompts(batch: TrainingBatch) -> tuple[list[np.ndarray], list[int]]:
    """Returns the prompts of a batch, and the number of response tokens of each."""
    row, column = np.divmod(batch.selected[batch.weights > 0], batch.tokens.shape[1])
    prompts, limits = [], []
    for index in np.unique(row):
        columns = column[row == index]
        prompts.append(batch.tokens[index, : columns[0] + 1])
        limits.append(len(columns))
    return prompts, limits


@functools.partial(jax.jit, static_argnums=2)
def _distribution(target: Model, hidden, top: int) -> tuple[Array, Array]:
    return top_distribution(target.logits(hidden[None].astype(target.config.dtype))[0], top)
