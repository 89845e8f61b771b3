"""Trains a draft on a corpus: the state, one step, and the loop over epochs."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bass_jax.models import Model
from bass_jax.models.model_config import ModelConfig
from bass_jax.training.agreement import measure_agreement
from bass_jax.training.batches import Batch, epoch_batches
from bass_jax.training.data import CorpusRows
from bass_jax.training.distill_config import DistillConfig, TrainingConfig
from bass_jax.training.draft_vocabulary import output_columns, proposed_ids
from bass_jax.training.loss import LossParts, LossWeights, distillation_loss, weights_at
from bass_jax.training.on_policy import OnPolicy
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.placement import Placement
from bass_jax.training.train_log import TrainLog, TrainProgress
from bass_jax.training.training_checkpoints import Place, SnapshotWriter, load_snapshot
from bass_jax.typing import Array, Float, Params

_MAX_WATCHED = 64


class TrainState(NamedTuple):
    """What the next step needs.

    Attributes:
        params: of the draft, float32, without the embedding, which is the target's and frozen.
        optimizer: Optax's state.
    """

    params: Params
    optimizer: Any


def train(
    config: DistillConfig,
    rows: CorpusRows,
    draft: Model,
    *,
    target: Model | None = None,
    progress: Callable[[TrainProgress], None] | None = None,
    is_over: bool = False,
) -> Model:
    """Trains until the configured step, going on from the last snapshot if there is one.

    The order of the data depends on the seed, the epoch and the epoch's shards, all part of the snapshot:
    a run that was killed ends at the same parameters, bit for bit on one machine's CPU. Every epoch reads
    the shards that exist when it begins, so that a corpus may still grow meanwhile.

    Args:
        config: of the distillation; ``output_dir`` receives ``snapshots/`` and ``metrics.jsonl``.
        rows: of the corpus.
        draft: initial parameters, with the target's embedding.
        target: scores the draft's own answers, where the configuration has an `on_policy_share`.
        progress: told at every line of metrics.
        is_over: take no step; return what the last snapshot holds.

    Returns:
        The draft of the last step; with `patience` that of the snapshot that was worth most on held-out prompts.

    Raises:
        ValueError: if the corpus is empty, the snapshots are of another draft or absent though the training
            `is_over`, the loss is not finite, or a snapshot cannot be written; the last snapshot then is from before
            that.
    """
    options, output = config.training, Path(config.output_dir)
    placement = Placement(options, draft.config)
    params = placement.place_params({name: leaf for name, leaf in draft.params.items() if name != "embedding"})
    embedding = placement.replicate(draft.params["embedding"])
    optimizer = make_optimizer(config.optimizer, options.num_steps, options.accumulate)
    state = TrainState(params, jax.jit(optimizer.init)(params))
    place = Place(0, 0, 0, rows.shards())
    if (snapshot := load_snapshot(output / "snapshots", state)) is not None:
        place, state = snapshot
    elif is_over:
        raise ValueError(f"{output / 'snapshots'}: no snapshot here: run the stage that trains first")
    like, state = state, jax.tree.map(jnp.array, state)  # Donated below: the caller keeps its own.
    columns = output_columns(proposed_ids(draft), draft.config.vocab_size)
    passes = passes_config(options, draft.config)
    read_embedding = embedding.astype(options.dtype)
    log = TrainLog(output / "metrics.jsonl", place.step, progress)
    own_answers = OnPolicy(config, draft, columns, target) if options.on_policy_share else None

    def trained(state: TrainState) -> Model:
        return Model(state.params | {"embedding": embedding}, draft.config, draft.output_ids)

    last = place.step if is_over else options.num_steps
    with SnapshotWriter(output / "snapshots") as snapshots:
        if is_spent(log.block_efficiencies(), options.patience):
            last = place.step
        for reached, batch, num_tokens, is_whole in _batches(config, rows, columns, draft.config, place, last):
            weights = weights_at(config.loss, reached.step / options.num_steps)
            if own_answers is not None:
                batch = own_answers.replace(batch, trained(state), reached)
            state, loss, parts = train_step(
                passes, config.loss.unroll, optimizer, state, read_embedding, placement.place_batch(batch), weights
            )
            log.add(reached.step if is_whole else reached.step + 1, loss, parts)
            if not is_whole:
                continue
            is_due = reached.step % options.save_every == 0 or reached.step == last
            if is_due or reached.step % options.log_every == 0:
                log.write(reached, num_tokens)
            if is_due:
                snapshots.save(reached, state)
                watched = _watched(rows, reached, draft.config)
                if watched:
                    log.write_held_out(reached, measure_agreement(trained(state), watched, config.draft_len))
                found = log.block_efficiencies()
                if options.patience is not None and found:
                    snapshots.best = best_step(found)
                    if is_spent(found, options.patience):
                        break
    found = log.block_efficiencies()
    if options.patience is not None and found:
        chosen = load_snapshot(output / "snapshots", like, best_step(found))
        if chosen is not None:
            state = chosen[1]
    return trained(state)


def passes_config(options: TrainingConfig, draft: ModelConfig) -> ModelConfig:
    """Returns the configuration of the passes to differentiate; the draft that comes out keeps its own, of float32."""
    rounded = None if options.product_dtype == "float32" else options.product_dtype
    return dataclasses.replace(draft, dtype=options.dtype, product_dtype=rounded)


def best_step(block_efficiencies: dict[int, float]) -> int:
    """Returns the step that was worth most; among equals the first."""
    return max(block_efficiencies, key=lambda step: (block_efficiencies[step], -step))


def is_spent(block_efficiencies: dict[int, float], patience: int | None) -> bool:
    """Whether the last `patience` measurements brought nothing better than one before them."""
    if patience is None or not block_efficiencies:
        return False
    best = best_step(block_efficiencies)
    return sum(step > best for step in block_efficiencies) >= patience


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def train_step(
    config: ModelConfig,
    unroll: int,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    embedding: Float[Array, "E V"],
    batch: Batch,
    weights: LossWeights,
) -> tuple[TrainState, Float[Array, ""], LossParts]:
    """One batch through the optimizer; `state` is donated.

    Parameters stay float32; the pass runs in the configuration's dtype.
    """

    def loss_of(params):
        cast = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
        return distillation_loss(config, cast | {"embedding": embedding}, batch, weights, unroll)

    (loss, parts), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss, parts


def _batches(
    config: DistillConfig, rows: CorpusRows, columns: np.ndarray, draft: ModelConfig, place: Place, last: int
) -> Iterator[tuple[Place, Batch, int, bool]]:
    """Yields batches from `place` to step `last`.

    With each come the place after it, the corpus' tokens, and whether it completes a step of the optimizer.
    """
    options, num_batches = config.training, 0
    reads_hidden = draft.hidden_width is not None
    while place.step < last:
        read = rows.trained(place.shards)
        if reads_hidden:
            read = with_features(read)
        num_tokens = sum(len(row.response) for row in read)
        batches = epoch_batches(
            read, columns, batch_tokens=options.batch_tokens, length_grain=options.length_grain,
            seed=(config.seed, place.epoch), skip=place.batch, row_grain=options.data_shards,
            reads_hidden=reads_hidden,
        )  # fmt: skip
        for batch in batches:
            num_batches += 1
            is_whole = num_batches % options.accumulate == 0
            place = place._replace(step=place.step + is_whole, batch=place.batch + 1)
            yield place, batch, num_tokens, is_whole
            if place.step == last:
                return
        place = Place(place.step, place.epoch + 1, 0, rows.shards())


def with_features(rows):
    """Leaves out rows whose hidden states were not kept.

    Raises:
        ValueError: if none is left.
    """
    kept = [row for row in rows if row.hidden_states is not None]
    if not kept:
        raise ValueError(
            "draft.reads_hidden: the corpus has no hidden states; write it with rollout.keep_features=true"
        )
    return kept


def _watched(rows: CorpusRows, place: Place, draft: ModelConfig):
    """Greedy answers to prompts kept apart, at most `_MAX_WATCHED`."""
    found = rows.held_out(place.shards)
    if draft.hidden_width is not None:
        found = [row for row in found if row.hidden_states is not None]
    return found[:_MAX_WATCHED]
