"""Training learns, resumes to the bit, and stops on a loss that is no number."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.training import trainer
from bass_jax.training.agreement import Agreement, measure_agreement
from bass_jax.training.batches import epoch_batches, make_batch
from bass_jax.training.draft_vocabulary import output_columns
from bass_jax.training.loss import distillation_loss, weights_at
from bass_jax.training.on_policy import OnPolicy
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.training_checkpoints import TrainingCheckpoints, TrainPosition
from tests.marks import mostly_slow
from tests.training.conftest import VOCAB, next_token, synthetic_rollouts


def _lines(config):
    with open(f"{config.output_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def _assert_same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("kind", "training"),
    [("adamw", {}), ("muon", {}), ("muon", {"dtype": "bfloat16"}), ("muon", {"product_dtype": "bfloat16"})],
)
def test_loss_falls_and_agreement_rises(make_config, make_rows, make_draft, kind, training):
    """In either dtype of the passes; parameters stay float32, finer than bfloat16 could hold them."""
    config = make_config(
        optimizer={"kind": kind, "schedule": "wsd"}, draft={"output_vocab_size": VOCAB}, training=training
    )
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
    head = trained.params["head"]
    assert trained.config == untrained.config and head.dtype == jnp.float32
    assert (head != head.astype(jnp.bfloat16)).mean() > 0.5


class _KilledError(Exception):
    pass


def test_killed_run_resumes_to_the_bit(make_config, make_rows, make_draft):
    # Breaking it: dropping `skip=place.batch`, or the optimizer's state from the snapshot.
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


@pytest.mark.slow
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


def test_batches_are_full():
    """A batch has the rows that fill it with responses, and few that stay empty."""
    rollouts = synthetic_rollouts(400)
    batches = list(epoch_batches(rollouts, np.arange(VOCAB), batch_tokens=128, length_grain=16, seed=(0, 0)))
    assert np.mean([batch.weights.mean() for batch in batches]) > 0.8
    assert np.mean([(batch.lengths > 0).mean() for batch in batches]) > 0.8
    # One shape for each length, or every batch would be compiled.
    assert len({batch.tokens.shape for batch in batches}) == len({batch.tokens.shape[1] for batch in batches}) > 1


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


@pytest.mark.parametrize(
    "shards", mostly_slow([{"data_shards": 4}, {"data_shards": 2, "param_shards": 2}], lambda shards: len(shards) == 2)
)
def test_four_devices_train_as_one_does(make_config, make_rows, make_draft, shards):
    """50 steps; sums over shards round otherwise, by some eps of the parameters' size per step."""
    shape = {"output_vocab_size": VOCAB, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    rows = make_rows(synthetic_rollouts(100))
    found = []
    for options in ({}, shards):
        config = make_config(draft=shape, optimizer={"kind": "muon"}, training={"num_steps": 50} | options)
        config = dataclasses.replace(config, output_dir=f"{config.output_dir}_{len(options)}")
        found.append((trainer.train(config, rows, make_draft(config)).params, _lines(config)))
    (alone, lines), (split, split_lines) = found
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(split)) == ("param_shards" in shards)
    for one, other in zip(lines, split_lines, strict=True):
        assert one["step"] == other["step"]
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-4)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(other, one, atol=50 * 2**-23 * 20 * np.abs(one).max())


def test_too_few_devices_are_named(make_config, make_rows, make_draft):
    config = make_config(training={"data_shards": 64})
    with pytest.raises(ValueError, match="data_shards=64, param_shards=1: expected at most"):
        trainer.train(config, make_rows(synthetic_rollouts(10)), make_draft(config))


@pytest.mark.slow
def test_accumulated_batches_are_one_step(make_config, make_rows, make_draft):
    """Two passes over half the rows move the parameters as the mean of both gradients does; a kill falls on a step."""
    options = {"num_steps": 6, "accumulate": 2, "save_every": 2, "log_every": 2}
    config = make_config(training=options, draft={"output_vocab_size": VOCAB})
    rows = make_rows(synthetic_rollouts(100))
    whole = trainer.train(config, rows, make_draft(config))
    assert [line["step"] for line in _lines(config) if "loss" in line] == [2, 4, 6]

    other = dataclasses.replace(config, output_dir=config.output_dir + "_killed")

    def kill(line):
        if line.step == 4:
            raise _KilledError

    with pytest.raises(_KilledError):
        trainer.train(other, rows, make_draft(config), progress=kill)
    _assert_same(whole.params, trainer.train(other, rows, make_draft(config)).params)

    # The mean gradient by hand, of the first step.
    draft, optimizer = make_draft(config), make_optimizer(config.optimizer, 6, 2)
    params = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    batches = list(
        epoch_batches(rows.trained([0, 1]), np.arange(VOCAB), batch_tokens=128, length_grain=32, seed=(0, 0))
    )
    weights = weights_at(config.loss, 1 / 6)

    @jax.jit
    def slope(params, batch):
        return jax.grad(lambda p: distillation_loss(draft.config, p | {"embedding": draft.params["embedding"]}, batch,
                                                    weights)[0])(params)  # fmt: skip

    mean = jax.tree.map(lambda a, b: (a + b) / 2, *(slope(params, batch) for batch in batches[:2]))
    alone = make_optimizer(config.optimizer, 6)
    expected, _ = alone.update(mean, alone.init(params), params)
    state = optimizer.init(params)
    for batch in batches[:2]:
        found, state = optimizer.update(slope(params, batch), state, params)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_it_stops_when_drafts_get_no_better_and_returns_the_best(make_config, make_rows, make_draft, monkeypatch):
    config = make_config(draft={"output_vocab_size": VOCAB}, training={"save_every": 5, "patience": 2})
    rows = make_rows(synthetic_rollouts(100))
    worth = iter([1.5, 2.0, 1.9, 1.8, 9.0])
    seen = []

    def measure(draft, rollouts, draft_len):
        seen.append(jax.tree.map(np.array, draft.params))
        return Agreement(10, 0.5, next(worth))

    monkeypatch.setattr(trainer, "measure_agreement", measure)
    best = trainer.train(config, rows, make_draft(config))
    assert len(seen) == 4
    _assert_same(best.params, seen[1])
    # The best is kept beside the last two, and a second run finds nothing left to do.
    assert [path.name[-2:] for path in sorted(Path(config.output_dir, "snapshots").glob("step_*"))] == [
        "10",
        "15",
        "20",
    ]
    _assert_same(trainer.train(config, rows, make_draft(config)).params, seen[1])
    assert len(seen) == 4


def test_a_full_disk_stops_and_keeps_the_last_snapshot(make_config, make_rows, make_draft, monkeypatch):
    config = make_config(draft={"output_vocab_size": VOCAB})
    rows = make_rows(synthetic_rollouts(100))
    real = Path.mkdir

    def full(self, *args, **options):
        if self.name == ".step_00000040.partial":
            raise OSError(28, "No space left on device")
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ValueError, match=r"snapshot of step 40 cannot be written .*No space left.*step_00000020"):
        trainer.train(config, rows, make_draft(config))
    monkeypatch.undo()
    assert [path.name for path in Path(config.output_dir, "snapshots").glob("step_*")] == ["step_00000020"]
    trainer.train(config, rows, make_draft(config))


def test_a_snapshot_is_in_its_place_as_soon_as_it_is_written(tmp_path):
    """Not when the next one is due: a run may be killed before that."""
    state, place = {"weight": jnp.arange(6.0)}, Place(5, 0, 2, [0, 1])
    with SnapshotWriter(tmp_path) as snapshots:
        snapshots.save(place, state)
        deadline = time.monotonic() + 60
        while not (tmp_path / "step_00000005").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = load_snapshot(tmp_path, state)
    assert found is not None and found[0] == place
    np.testing.assert_array_equal(found[1]["weight"], state["weight"])


def test_a_hidden_state_draft_learns_what_its_target_knows(make_config, make_rows, make_draft, target):
    """Its target's state holds the next token, which does not follow from the tokens."""
    random = np.random.default_rng(0)
    table = random.normal(size=(VOCAB, target.config.width)).astype(np.float16)
    rollouts = []
    for row in synthetic_rollouts(200):
        response = random.integers(0, VOCAB, len(row.response)).astype(np.int32)
        sequence = np.concatenate([row.prompt, response])
        # The state at a token tells the one after the next: the first draft is known, no further one.
        ahead = np.append(sequence[2:], 0)
        distributions = np.concatenate([response[:, None], row.distribution_ids[:, 1:]], axis=1)
        rollouts.append(row._replace(response=response, distribution_ids=distributions, hidden=table[ahead]))
    config = make_config(
        draft={"reads_hidden": True, "output_vocab_size": VOCAB}, training={"num_steps": 150, "save_every": 150},
        loss={"soft_weight": 0.0, "hard_weight": 1.0, "hidden_weight": 0.1, "unroll": 1},
    )  # fmt: skip
    rows = make_rows(rollouts)
    trained = trainer.train(config, rows, make_draft(config))
    measured = measure_agreement(trained, rows.held_out(rows.shards()), 4)
    assert measured.agreement > 0.8
    assert 1.6 < measured.block_efficiency < 2.1
    with pytest.raises(ValueError, match="the corpus has no hidden states"):
        trainer.with_features(synthetic_rollouts(3))


def test_batches_on_the_drafts_own_answers(make_config, make_draft, target):
    """Its tokens, scored by the target: the distribution is that of a fresh pass, and the same call gives the same
    batch.
    """
    config = make_config(training={"on_policy_share": 1.0})
    draft = make_draft(config)
    columns = output_columns(np.asarray(draft.output_ids), VOCAB)
    batch = make_batch(synthetic_rollouts(3), columns, 32, 64, 3)
    own = OnPolicy(config, draft, columns, target)
    place = Place(1, 0, 1, [0])
    found = own.replace(batch, draft, place)
    _assert_same(found, own.replace(batch, draft, place))
    np.testing.assert_array_equal(found.lengths, batch.lengths)
    for row in range(3):
        place_of = found.selected[: int(found.weights.sum())] // 32 == row
        first = int(found.selected[: len(place_of)][place_of][0]) % 32 + 1
        text = found.tokens[row, : found.lengths[row]].tolist()
        assert text[:first] == batch.tokens[row, :first].tolist()
        for place, label in zip(range(first, len(text) + 1), found.labels[: len(place_of)][place_of], strict=True):
            if place < len(text):
                assert text[place] == next_token(draft, text[:place])
            most_probable = next_token(target, text[:place])
            assert label == columns[most_probable]
    with pytest.raises(ValueError, match="expected a target"):
        OnPolicy(config, draft, columns, None)


@pytest.mark.slow
def test_training_on_its_own_answers_learns(make_config, make_rows, make_draft, target):
    config = make_config(training={"on_policy_share": 0.5, "num_steps": 12, "save_every": 6, "log_every": 3})
    rows = make_rows(synthetic_rollouts(60))
    whole = trainer.train(config, rows, make_draft(config), target=target)
    other = dataclasses.replace(config, output_dir=config.output_dir + "_killed")

    def kill(line):
        if line.step == 9:
            raise _KilledError

    with pytest.raises(_KilledError):
        trainer.train(other, rows, make_draft(config), target=target, progress=kill)
    _assert_same(whole.params, trainer.train(other, rows, make_draft(config), target=target).params)


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
