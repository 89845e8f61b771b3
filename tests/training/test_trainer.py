"""Training learns, resumes to the bit, and stops on a loss that is no number."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from bass_jax.training import trainer
from bass_jax.training.agreement import measure_agreement
from bass_jax.training.batches import epoch_batches
from bass_jax.training.vocabulary import output_columns
from tests.training.conftest import VOCAB, synthetic_rollouts


def _lines(config):
    with open(f"{config.output_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def _assert_same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loss_falls_and_agreement_rises(make_config, make_rows, make_draft, kind):
    config = make_config(optimizer={"kind": kind, "schedule": "wsd"}, draft={"output_vocab_size": VOCAB})
    rows = make_rows(synthetic_rollouts(200))
    untrained = make_draft(config)
    before = measure_agreement(untrained, synthetic_rollouts(20, seed=1), draft_len=4)
    trained = trainer.train(config, rows, untrained)
    after = measure_agreement(trained, synthetic_rollouts(20, seed=1), draft_len=4)
    assert before.agreement < 0.2
    assert after.agreement > 0.9
    assert after.block_efficiency > 3 > before.block_efficiency
    losses = [line["loss"] for line in _lines(config) if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]


class _KilledError(Exception):
    pass


def test_killed_run_resumes_to_the_bit(make_config, make_rows, make_draft):
    # Breaking it: dropping `skip=place.batch`, or the optimiser's state from the snapshot.
    config = make_config(draft={"output_vocab_size": VOCAB})
    rows = make_rows(synthetic_rollouts(100))
    whole = trainer.train(config, rows, make_draft(config))
    lines = [line for line in _lines(config) if "loss" in line]

    other = dataclasses.replace(config, output_dir=config.output_dir + "_killed")

    def kill(line):
        if line.step == 35:
            raise _KilledError

    with pytest.raises(_KilledError):
        trainer.train(other, rows, make_draft(config), progress=kill)
    resumed = trainer.train(other, rows, make_draft(config))
    _assert_same(whole.params, resumed.params)
    # The same curve, and no line twice.
    assert [line["loss"] for line in lines] == [line["loss"] for line in _lines(other) if "loss" in line]


def test_corpus_that_grows_is_read_from_the_next_epoch_on(make_config, make_rows, make_draft):
    config = make_config(draft={"output_vocab_size": VOCAB})
    rollouts = synthetic_rollouts(150)
    rows = make_rows(rollouts[:50])
    tokens = sum(len(row.response) for row in rows.trained([0]))

    def grow(line):
        if line.epoch == 0:
            make_rows(rollouts)

    trainer.train(config, rows, make_draft(config), progress=grow)
    seen = [line["corpus_tokens"] for line in _lines(config) if "corpus_tokens" in line]
    assert seen[0] == tokens
    assert seen[-1] > 2 * tokens


def test_order_of_the_data_depends_on_seed_and_epoch_alone():
    rollouts, columns = synthetic_rollouts(60), np.arange(VOCAB)

    def order(seed, skip=0):
        batches = epoch_batches(rollouts, columns, batch_tokens=128, length_grain=16, seed=seed, skip=skip)
        return [batch.tokens.tobytes() for batch in batches]

    assert order((0, 1)) == order((0, 1))
    assert order((0, 1))[3:] == order((0, 1), skip=3)
    assert order((0, 1)) != order((0, 2))
    assert order((0, 1)) != order((1, 1))


def test_every_response_token_is_trained_on_once():
    rollouts = synthetic_rollouts(60)
    columns = output_columns(np.arange(VOCAB), VOCAB)
    batches = list(epoch_batches(rollouts, columns, batch_tokens=128, length_grain=16, seed=(0, 0)))
    assert sum(batch.weights.sum() for batch in batches) == sum(len(row.response) for row in rollouts)
    for batch in batches:
        inside = batch.weights > 0
        followed = np.pad(batch.tokens, ((0, 0), (0, 1))).reshape(len(batch.tokens), -1)
        row, column = np.divmod(batch.selected[inside], batch.tokens.shape[1])
        # What follows a selected place is the label, unless the row's inputs end there.
        is_last = column == batch.lengths[row] - 1
        np.testing.assert_array_equal(followed[row, column + 1][~is_last], batch.labels[inside][~is_last])


def test_loss_that_is_no_number_stops_and_keeps_the_last_snapshot(make_config, make_rows, make_draft, monkeypatch):
    config = make_config(draft={"output_vocab_size": VOCAB})
    rows = make_rows(synthetic_rollouts(100))
    real_step, steps = trainer.train_step, []

    def poisoned(*args):
        state, loss, parts = real_step(*args)
        steps.append(None)
        return state, loss * (np.nan if len(steps) >= 33 else 1), parts

    monkeypatch.setattr(trainer, "train_step", poisoned)
    with pytest.raises(ValueError, match="loss is nan at step 33: stopped"):
        trainer.train(config, rows, make_draft(config))
    monkeypatch.undo()
    assert [path.name for path in Path(config.output_dir, "snapshots").glob("step_*")] == ["step_00000020"]
    trainer.train(config, rows, make_draft(config))


def test_empty_corpus_is_refused(make_config, make_rows, make_draft):
    config = make_config()
    with pytest.raises(ValueError, match="the corpus is empty"):
        trainer.train(config, make_rows([]), make_draft(config))


def test_snapshot_of_another_draft_is_refused(make_config, make_rows, make_draft):
    config = make_config(training={"num_steps": 20})
    rows = make_rows(synthetic_rollouts(50))
    trainer.train(config, rows, make_draft(config))
    other = make_config(training={"num_steps": 20}, draft={"mlp_width": 48})
    with pytest.raises(ValueError, match=r"step_00000020.*another shape|not a snapshot"):
        trainer.train(other, rows, make_draft(other))
