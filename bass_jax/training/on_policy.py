"""Batches on the draft's own answers, scored by the target: the prefixes that the draft will meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models import Model
from bass_jax.training.batches import Batch, make_batch
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.rollout import Rollout, roll_out, top_distribution
from bass_jax.training.training_checkpoints import Place
from bass_jax.typing import Array, Int

_CHUNK = 256


class OnPolicy:
    """Replaces the answers of a share of the batches.

    What a batch becomes depends on its place, its prompts and the draft's parameters there, so that a training that was
    killed resumes to the same batches.
    """

    def __init__(self, config: DistillConfig, draft: Model, columns: Int[np.ndarray, "V"], target: Model | None):
        """Prepares.

        Args:
            config: how many batches, and how answers are drawn.
            draft: that will be trained.
            columns: output column of every token.
            target: that scores.

        Raises:
            ValueError: without a target, or with a draft that reads its hidden states.
        """
        share = config.training.on_policy_share
        if target is None:
            raise ValueError(f"on_policy_share={share}: expected a target, which scores the draft's answers")
        if draft.config.hidden_width is not None:
            raise ValueError(f"on_policy_share={share}: a draft that reads hidden states does not write by itself")
        self._config, self._columns, self._target = config, columns, target

    def replace(self, batch: Batch, draft: Model, place: Place) -> Batch:
        """Returns `batch`, or its prompts with answers of the draft's, as long as the target's were at most.

        Args:
            batch: of the corpus.
            draft: as it stands.
            place: of the batch.
        """
        config = self._config
        seed = np.random.default_rng((config.seed, place.epoch, place.batch))
        if seed.random() >= config.training.on_policy_share:
            return batch
        num_rows, length = batch.tokens.shape
        prompts, longest = _prompts(batch)
        temperatures = list(config.rollout.temperatures)
        shares = np.array([config.rollout.temperatures[value] for value in temperatures], float)
        written = roll_out(
            draft,
            prompts,
            temperatures=[float(seed.choice(temperatures, p=shares / shares.sum())) for _ in prompts],
            key=jax.random.key(int(seed.integers(1 << 31))),
            max_new_tokens=max(longest),
            stop_ids=(),
            top=min(config.rollout.top, len(np.unique(self._columns)) - 1),
        )
        answers = [row._replace(response=row.response[:limit]) for row, limit in zip(written, longest, strict=True)]
        scored = score(self._target, answers, config.rollout.top, length)
        return make_batch(scored, self._columns, length, len(batch.weights), num_rows)


def score(target: Model, rollouts: list[Rollout], top: int, length: int) -> list[Rollout]:
    """Gives answers, whoever wrote them, the distribution that the target has at each of their tokens.

    Args:
        target: that scores.
        rollouts: whose distributions are replaced.
        top: tokens of the distribution.
        length: sequences are padded to this.
    """
    num_rows = len(rollouts)
    tokens, lengths = np.zeros((num_rows, length), np.int32), np.zeros(num_rows, np.int32)
    for index, row in enumerate(rollouts):
        sequence = np.concatenate([row.prompt, row.response[:-1]])
        tokens[index, : len(sequence)], lengths[index] = sequence, len(sequence)
    hidden_states = _features(target, tokens, lengths)
    scored = []
    for index, row in enumerate(rollouts):
        first = len(row.prompt) - 1
        kept = np.zeros((-(-len(row.response) // _CHUNK) * _CHUNK, hidden_states.shape[-1]), np.float32)
        kept[: len(row.response)] = hidden_states[index, first : first + len(row.response)]
        distributions = [
            jax.device_get(_distribution(target, kept[start : start + _CHUNK], top))
            for start in range(0, len(kept), _CHUNK)
        ]
        ids, logprobs = (np.concatenate(parts)[: len(row.response)] for parts in zip(*distributions, strict=True))
        scored.append(row._replace(distribution_ids=ids, distribution_logprobs=logprobs))
    return scored


def _prompts(batch: Batch) -> tuple[list[np.ndarray], list[int]]:
    """The prompts of a batch, and how many tokens answered each."""
    row, column = np.divmod(batch.selected[batch.weights > 0], batch.tokens.shape[1])
    prompts, longest = [], []
    for index in np.unique(row):
        places = column[row == index]
        prompts.append(batch.tokens[index, : places[0] + 1])
        longest.append(len(places))
    return prompts, longest


@jax.jit
def _features(target: Model, tokens, lengths) -> Array:
    columns = jnp.arange(tokens.shape[1])
    positions = jnp.where(columns < lengths[:, None], columns, tokens.shape[1])
    cache = target.init_cache(*tokens.shape)
    return target.hidden_states(tokens, positions, cache).hidden.astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def _distribution(target: Model, hidden_states, top: int) -> tuple[Array, Array]:
    return top_distribution(target.logits(hidden_states[None].astype(target.config.dtype))[0], top)
