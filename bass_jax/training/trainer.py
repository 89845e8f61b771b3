"""Trains a draft on a corpus: the state, one step, and the loop over epochs."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bass_jax.drafters import EarlyExitModel
from bass_jax.drafters.eagle.eagle3 import Eagle3Model
from bass_jax.models import Model
from bass_jax.models.model_config import ModelConfig
from bass_jax.training.agreement import measure_agreement
from bass_jax.training.batches import TrainingBatch, epoch_batches
from bass_jax.training.data import CorpusRows
from bass_jax.training.distill_config import DistillConfig, TrainingConfig
from bass_jax.training.draft_vocabulary import output_columns, proposed_ids
from bass_jax.training.init_draft import Draft, reads_target
from bass_jax.training.loss import LossParts, LossWeights, distillation_loss, weights_at
from bass_jax.training.on_policy import on_policy_batch
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.placement import place, place_params, training_mesh
from bass_jax.training.rollout import Rollout, sequence_hidden, with_hidden
from bass_jax.training.train_log import TrainLog, TrainProgress
from bass_jax.training.training_checkpoints import TrainingCheckpoints, TrainPosition
from bass_jax.typing import Array, Float, Params

_MAX_EVALUATED = 64


class TrainState(NamedTuple):
    """The state of a training between two steps."""

    params: Params  # of the draft, float32, without the embedding, which is the target's and not trained
    optimizer: Any  # Optax's state


def train(
    config: DistillConfig,
    rows: CorpusRows,
    draft: Draft,
    target: Model,
    *,
    progress: Callable[[TrainProgress], None] | None = None,
    load_only: bool = False,
) -> Draft:
    """Trains up to the configured step, from the last training checkpoint if there is one.

    The order of the data depends on the seed, the epoch and the epoch's shards, which the checkpoint holds. A run that
    was killed and continued therefore ends with the same parameters, bit for bit on one machine's CPU. Each epoch reads
    the shards that exist when it begins, so the corpus may grow during the training.

    Args:
        config: of the distillation; ``checkpoints/`` and ``metrics.jsonl`` are written to its ``output_dir``.
        rows: of the corpus.
        draft: initial parameters, with the target's embedding.
        target: computes the hidden states that a head reads; and scores the draft's own answers, if
            `on_policy_share` is not 0.
        progress: called with every line of the log.
        load_only: take no step and return the draft of the last checkpoint.

    Returns:
        The draft after the last step; with `patience` that of the best checkpoint.

    Raises:
        ValueError: if the corpus is empty, the checkpoints are of another draft, there is none although `load_only` is
            set, the loss is not finite, or a checkpoint cannot be written.
    """
    options, output = config.training, Path(config.output_dir)
    mesh = training_mesh(options)
    params = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    params = place_params(params, draft, mesh)
    embedding = place(draft.params["embedding"], mesh)
    optimizer = make_optimizer(config.optimizer, options.num_steps, options.accumulate)
    initial = TrainState(params, jax.jit(optimizer.init)(params))
    columns = output_columns(proposed_ids(draft), draft.config.vocab_size)
    step_draft = dataclasses.replace(draft, params={}, config=differentiated_config(options, draft.config))
    if isinstance(draft, EarlyExitModel):  # The target's layers are not trained.
        step_draft = place(jax.tree.map(lambda leaf: leaf.astype(options.dtype), step_draft), mesh)
    step_embedding = embedding.astype(options.dtype)

    def current(state: TrainState) -> Draft:
        return dataclasses.replace(draft, params=state.params | {"embedding": embedding})

    with TrainingCheckpoints(output / "checkpoints") as checkpoints:
        found = checkpoints.load(initial)
        if found is None and load_only:
            raise ValueError(f"{output / 'checkpoints'}: no training checkpoint here: run the train stage first")
        position, state = found or (TrainPosition(0, 0, 0, rows.shards()), initial)
        state = jax.tree.map(jnp.array, state)  # A copy, because a step donates it.
        log = TrainLog(output / "metrics.jsonl", position.step, progress)
        is_over = load_only or is_spent(log.tokens_per_pass(), options.patience)
        last = position.step if is_over else options.num_steps
        batches = _batches(config, rows, columns, draft, position, last)
        evaluated = _Evaluated(rows, draft, target)
        for position, batch, num_tokens, is_step in batches:
            weights = weights_at(config.loss, position.step / options.num_steps)
            if options.on_policy_share:
                batch = on_policy_batch(config, batch, position, current(state), target, columns)
            if isinstance(draft, Eagle3Model):
                layers = draft.head.hidden_layers
                hidden = sequence_hidden(target, batch.tokens, batch.lengths, hidden_layers=layers)
                batch = batch._replace(hidden=hidden)
            batch = place(batch, mesh, "data")
            state, loss, parts = train_step(
                config.loss.unroll, optimizer, step_draft, state, step_embedding, batch, weights
            )
            log.add(position.step if is_step else position.step + 1, loss, parts)
            if not is_step:
                continue
            is_due = position.step % options.save_every == 0 or position.step == last
            if is_due or position.step % options.log_every == 0:
                log.write(position, num_tokens)
            if is_due:
                if chosen := evaluated.rows(position):
                    log.write_held_out(position, measure_agreement(current(state), chosen, config.draft_len))
                tokens_per_pass = log.tokens_per_pass()
                best = best_step(tokens_per_pass) if options.patience is not None and tokens_per_pass else None
                checkpoints.save(position, state, best)
                if is_spent(tokens_per_pass, options.patience):
                    break
        tokens_per_pass = log.tokens_per_pass()
        if options.patience is not None and tokens_per_pass:
            checkpoints.wait()
            if (chosen := checkpoints.load(initial, best_step(tokens_per_pass))) is not None:
                state = chosen[1]
    return current(state)


def differentiated_config(options: TrainingConfig, draft: ModelConfig) -> ModelConfig:
    """Returns the configuration of the passes that are differentiated; the trained draft keeps its own, in float32."""
    product_dtype = None if options.product_dtype == "float32" else options.product_dtype
    return dataclasses.replace(draft, dtype=options.dtype, product_dtype=product_dtype)


def best_step(tokens_per_pass: dict[int, float]) -> int:
    """Returns the step with the most tokens per target pass, the first one of equals."""
    return max(tokens_per_pass, key=lambda step: (tokens_per_pass[step], -step))


def is_spent(tokens_per_pass: dict[int, float], patience: int | None) -> bool:
    """Returns whether none of the last `patience` measurements is higher than an earlier one."""
    if patience is None or not tokens_per_pass:
        return False
    best = best_step(tokens_per_pass)
    return sum(step > best for step in tokens_per_pass) >= patience


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def train_step(
    unroll: int,
    optimizer: optax.GradientTransformation,
    draft: Draft,
    state: TrainState,
    embedding: Float[Array, "E V"],
    batch: TrainingBatch,
    weights: LossWeights,
) -> tuple[TrainState, Float[Array, ""], LossParts]:
    """Takes one step of the optimizer on one batch. Donates `state`.

    The parameters are float32; the passes have the dtype of `draft`, whose own parameters are not read.
    """

    def loss_of(params):
        cast = jax.tree.map(lambda leaf: leaf.astype(draft.config.dtype), params)
        found = dataclasses.replace(draft, params=cast | {"embedding": embedding})
        return distillation_loss(found, batch, weights, unroll)

    (loss, parts), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss, parts


def _batches(
    config: DistillConfig, rows: CorpusRows, columns: np.ndarray, draft: Draft, position: TrainPosition, last: int
) -> Iterator[tuple[TrainPosition, TrainingBatch, int, bool]]:
    """Yields the batches from `position` to step `last`.

    Each comes with the position after it, the response tokens of its epoch, and whether it completes an optimizer step.
    """
    options, num_batches = config.training, 0
    reads_hidden = isinstance(draft, Model) and reads_target(draft)
    while position.step < last:
        trained = rows.trained(position.shards)
        if reads_hidden:
            trained = rows_with_hidden(trained)
        num_tokens = sum(len(row.response) for row in trained)
        batches = epoch_batches(
            trained,
            columns,
            batch_tokens=options.batch_tokens,
            length_grain=options.length_grain,
            seed=(config.seed, position.epoch),
            skip=position.batch,
            row_grain=options.data_shards,
            reads_hidden=reads_hidden,
        )
        for batch in batches:
            num_batches += 1
            is_step = num_batches % options.accumulate == 0
            position = position._replace(step=position.step + is_step, batch=position.batch + 1)
            yield position, batch, num_tokens, is_step
            if position.step == last:
                return
        position = TrainPosition(position.step, position.epoch + 1, 0, rows.shards())


def rows_with_hidden(rows: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rows that have the target's hidden states.

    Raises:
        ValueError: if there are none.
    """
    kept = [row for row in rows if row.hidden is not None]
    if not kept:
        raise ValueError(
            "draft.reads_hidden: the corpus has no hidden states; write it with rollout.keep_hidden_states=true"
        )
    return kept


class _Evaluated:
    """Greedy answers to held-out prompts of the corpus, at most `_MAX_EVALUATED`."""

    def __init__(self, rows: CorpusRows, draft: Draft, target: Model):
        self._rows, self._draft, self._target = rows, draft, target
        self._found: list[Rollout] = []

    def rows(self, position: TrainPosition) -> list[Rollout]:
        """Returns the rows for a checkpoint at `position`, with the hidden states that the draft reads."""
        found = self._rows.held_out(position.shards)
        if isinstance(self._draft, Eagle3Model):
            if len(self._found) < min(len(found), _MAX_EVALUATED):
                self._found = with_hidden(found[:_MAX_EVALUATED], self._target, self._draft.head.hidden_layers)
            return self._found
        if reads_target(self._draft):
            found = [row for row in found if row.hidden is not None]
        return found[:_MAX_EVALUATED]
