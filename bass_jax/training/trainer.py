"""Trains a draft on a corpus: the state, one step, and the loop over epochs."""

import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bass_jax.config import ModelConfig
from bass_jax.models import Model
from bass_jax.training.agreement import measure_agreement
from bass_jax.training.batches import Batch, epoch_batches
from bass_jax.training.config import DistillConfig, LossConfig
from bass_jax.training.data import CorpusRows
from bass_jax.training.loss import LossParts, distillation_loss
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.snapshots import Place, load_snapshot, save_snapshot
from bass_jax.training.vocabulary import output_columns, proposed_ids
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


class TrainProgress(NamedTuple):
    """One line of metrics.

    Attributes:
        step: optimiser steps taken.
        epoch: passes over the corpus begun, less one.
        loss: mean since the last line, in nats per response token.
        soft: its soft part.
        hard: its hard part.
        agreement: with the target's likeliest token, on the batches trained on.
        tokens_per_second: response tokens.
        seconds: of this process.
        corpus_tokens: response tokens of this epoch's corpus.
    """

    step: int
    epoch: int
    loss: float
    soft: float
    hard: float
    agreement: float
    tokens_per_second: float
    seconds: float
    corpus_tokens: int


def train(
    config: DistillConfig,
    rows: CorpusRows,
    draft: Model,
    *,
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
        progress: told at every line of metrics.
        is_over: take no step; return what the last snapshot holds.

    Raises:
        ValueError: if the corpus is empty, the snapshots are of another draft or absent though the training
            `is_over`, or the loss is not finite; the last snapshot then is from before that.
    """
    options, output = config.training, Path(config.output_dir)
    trainable = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    embedding = draft.params["embedding"]
    optimizer = make_optimizer(config.optimizer, options.num_steps)
    state = TrainState(trainable, optimizer.init(trainable))
    place = Place(0, 0, 0, rows.shards())
    if (snapshot := load_snapshot(output / "snapshots", state)) is not None:
        place, state = snapshot
    elif is_over:
        raise ValueError(f"{output / 'snapshots'}: no snapshot here: run the stage that trains first")
    state = jax.tree.map(jnp.array, state)  # Donated below: the caller keeps its own.
    columns = output_columns(proposed_ids(draft), draft.config.vocab_size)
    log = _Log(output / "metrics.jsonl", place.step, progress)
    last = place.step if is_over else options.num_steps
    for reached, batch, num_tokens in _batches(config, rows, columns, place, last):
        state, loss, parts = train_step(draft.config, config.loss, optimizer, state, embedding, batch)
        log.add(loss, parts)
        is_due = reached.step % options.save_every == 0 or reached.step == last
        if is_due or reached.step % options.log_every == 0:
            log.write(reached, num_tokens)
        if is_due:
            save_snapshot(output / "snapshots", reached, state)
            watched = rows.held_out(reached.shards)[:_MAX_WATCHED]
            if watched:
                trained = Model(state.params | {"embedding": embedding}, draft.config, draft.output_ids)
                log.write_held_out(reached, measure_agreement(trained, watched, config.draft_len))
    return Model(state.params | {"embedding": embedding}, draft.config, draft.output_ids)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def train_step(
    config: ModelConfig,
    weights: LossConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    embedding: Float[Array, "E V"],
    batch: Batch,
) -> tuple[TrainState, Float[Array, ""], LossParts]:
    """One step of the optimiser; `state` is donated.

    Parameters stay float32; the pass runs in the draft's dtype.
    """

    def loss_of(params):
        cast = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
        return distillation_loss(config, cast | {"embedding": embedding}, batch, weights)

    (loss, parts), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss, parts


def _batches(
    config: DistillConfig, rows: CorpusRows, columns: np.ndarray, place: Place, last: int
) -> Iterator[tuple[Place, Batch, int]]:
    """Yields batches from `place` to step `last`, each with the place after it and the corpus' tokens."""
    options = config.training
    while place.step < last:
        trained = rows.trained(place.shards)
        num_tokens = sum(len(row.response) for row in trained)
        batches = epoch_batches(
            trained, columns, batch_tokens=options.batch_tokens, length_grain=options.length_grain,
            seed=(config.seed, place.epoch), skip=place.batch,
        )  # fmt: skip
        for batch in batches:
            place = place._replace(step=place.step + 1, batch=place.batch + 1)
            yield place, batch, num_tokens
            if place.step == last:
                return
        place = Place(place.step, place.epoch + 1, 0, rows.shards())


class _Log:
    """Collects losses on the device, and writes them out once per line: looking at each would stall it."""

    def __init__(self, path: Path, step: int, progress: Callable[[TrainProgress], None] | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._progress = path, progress
        # Lines past the snapshot that this run starts from will be written again.
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))
        self._pending: list[tuple[Array, LossParts]] = []
        self._start = self._last = time.perf_counter()

    def add(self, loss: Array, parts: LossParts) -> None:
        self._pending.append((loss, parts))

    def write(self, place: Place, corpus_tokens: int) -> None:
        if not self._pending:
            return
        values = jax.device_get(self._pending)
        for offset, (loss, _) in enumerate(values):
            if not math.isfinite(loss):
                step = place.step - len(values) + 1 + offset
                raise ValueError(
                    f"loss is {loss} at step {step}: stopped; the last snapshot is from before. "
                    "A lower optimizer.learning_rate or clip_norm may help"
                )
        tokens = np.array([parts.num_tokens for _, parts in values])
        share = tokens / tokens.sum()
        now = time.perf_counter()
        mean = {
            "loss": float((share * [loss for loss, _ in values]).sum()),
            **{name: float((share * [getattr(parts, name) for _, parts in values]).sum())
               for name in ("soft", "hard", "agreement")},
        }  # fmt: skip
        line = TrainProgress(
            place.step, place.epoch, **mean, tokens_per_second=float(tokens.sum() / (now - self._last)),
            seconds=now - self._start, corpus_tokens=corpus_tokens,
        )  # fmt: skip
        self._pending, self._last = [], now
        self._append({name: _short(value) for name, value in line._asdict().items()})
        if self._progress is not None:
            self._progress(line)

    def write_held_out(self, place: Place, measured: Any) -> None:
        content = {f"held_out_{name}": _short(value) for name, value in measured._asdict().items()}
        self._append({"step": place.step, **content})

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
