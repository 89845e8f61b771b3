"""Training learns, continues bit for bit after a kill, and stops when the loss is not finite."""

import dataclasses
import json
import resource
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from bass_jax.training import trainer
from bass_jax.training.agreement import Agreement, measure_agreement
from bass_jax.training.batches import epoch_batches, make_batch
from bass_jax.training.draft_vocabulary import output_columns
from bass_jax.training.loss import distillation_loss, weights_at
from bass_jax.training.on_policy import on_policy_batch
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.rollout import with_hidden
from bass_jax.training.training_checkpoints import TrainingCheckpoints, TrainPosition
from tests.marks import mostly_slow
from tests.training.conftest import VOCAB, next_token, synthetic_rollouts


@pytest.fixture
def train(make_draft, target):
    """Trains the initial draft of a configuration."""

    def run(config, rows, **options):
        return trainer.train(config, rows, make_draft(config), target, **options)

    return run


@pytest.fixture
def full_config(make_config):
    """Makes a configuration whose draft proposes all tokens."""

    def make(draft=None, **sections):
        return make_config(draft={"output_vocab_size": VOCAB} | (draft or {}), **sections)

    return make


def read_lines(config):
    return [json.loads(line) for line in Path(config.output_dir, "metrics.jsonl").read_text().splitlines()]


def checkpoint_names(config):
    return sorted(path.name for path in Path(config.output_dir, "checkpoints").iterdir() if not path.suffix)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_unchanged(directory):
    """Waits until no file of `directory` changed for half a second: threads of a failed write can still be running."""
    before = None
    while before != (before := sorted((path, path.stat().st_mtime_ns) for path in directory.rglob("*"))):
        time.sleep(0.5)


def assert_same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("kind", "training"),
    mostly_slow(
        [("adamw", {}), ("muon", {}), ("muon", {"dtype": "bfloat16"}), ("muon", {"product_dtype": "bfloat16"})],
        lambda case: case[1] == {"dtype": "bfloat16"},
    ),
)
def test_the_loss_falls_and_the_agreement_rises(full_config, make_rows, make_draft, train, kind, training):
    """With passes of either dtype; the parameters are float32, which bfloat16 could not represent."""
    config = full_config(optimizer={"kind": kind, "schedule": "wsd"}, training=training)
    untrained, unseen = make_draft(config), synthetic_rollouts(20, seed=1)
    before = measure_agreement(untrained, unseen, draft_len=4)
    trained = train(config, make_rows(synthetic_rollouts(200)))
    after = measure_agreement(trained, unseen, draft_len=4)
    assert before.agreement < 0.2
    assert after.agreement > 0.9
    assert after.tokens_per_pass > 3 > before.tokens_per_pass
    losses = [line["loss"] for line in read_lines(config) if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    head = trained.params["head"]
    assert trained.config == untrained.config and head.dtype == jnp.float32
    assert (head != head.astype(jnp.bfloat16)).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_head_learns_with_hidden_states_that_the_corpus_does_not_hold(
    full_config, make_rows, make_draft, train, target, kind
):
    layers = (0, 1, 2)
    config = full_config(
        draft={"kind": kind, "width": target.config.width, "hidden_layers": layers},
        training={"num_steps": 200, "save_every": 100},
        loss={"unroll": 5},
    )
    unseen = with_hidden(synthetic_rollouts(20, seed=1), target, layers)
    before = measure_agreement(make_draft(config), unseen, draft_len=4)
    rows = make_rows(synthetic_rollouts(200))
    trained = train(config, rows)
    after = measure_agreement(trained, unseen, draft_len=4)
    assert before.agreement < 0.2 and after.agreement > 0.9
    assert after.tokens_per_pass > (3 if kind == "eagle3" else 2) > before.tokens_per_pass
    assert [line["step"] for line in read_lines(config) if "held_out_tokens_per_pass" in line] == [100, 200]
    # A run that was killed continues with the same parameters.
    shutil.rmtree(Path(config.output_dir) / "checkpoints" / "step_00000200")
    assert_same(train(config, rows).params, trained.params)


class _KilledError(Exception):
    pass


def train_with_a_kill(train, config, rows, step):
    """Trains until a kill at `step`, then trains on; returns the draft and the changed configuration."""
    config = dataclasses.replace(config, output_dir=config.output_dir + "_killed")

    def kill(line):
        if line.step == step:
            raise _KilledError

    with pytest.raises(_KilledError):
        train(config, rows, progress=kill)
    return train(config, rows), config


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(full_config, make_rows, train):
    # Breaking it: dropping `skip=position.batch`, or the optimizer's state from the checkpoint.
    config, rows = full_config(), make_rows(synthetic_rollouts(100))
    whole = train(config, rows)
    lines = [line for line in read_lines(config) if "loss" in line]
    continued, other = train_with_a_kill(train, config, rows, 35)
    assert_same(whole.params, continued.params)
    # The same losses, and no line twice.
    assert [line["loss"] for line in lines] == [line["loss"] for line in read_lines(other) if "loss" in line]


@pytest.mark.slow
def test_a_growing_corpus_is_read_from_the_next_epoch_on(full_config, make_rows, train):
    config, rollouts = full_config(), synthetic_rollouts(150)
    rows = make_rows(rollouts[:50])
    tokens = sum(len(row.response) for row in rows.trained([0]))

    def grow(line):
        if line.epoch == 0:
            make_rows(rollouts)

    train(config, rows, progress=grow)
    seen = [line["corpus_tokens"] for line in read_lines(config) if "corpus_tokens" in line]
    assert seen[0] == tokens
    assert seen[-1] > 2 * tokens


def test_the_order_of_the_data_depends_on_seed_and_epoch_only():
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
        following = np.pad(batch.tokens, ((0, 0), (0, 1))).reshape(len(batch.tokens), -1)
        row, column = np.divmod(batch.selected[inside], batch.tokens.shape[1])
        # The token after a selected position is its label, except at the end of a row's inputs.
        is_last = column == batch.lengths[row] - 1
        np.testing.assert_array_equal(following[row, column + 1][~is_last], batch.labels[inside][~is_last])


def test_batches_are_full():
    rollouts = synthetic_rollouts(400)
    batches = list(epoch_batches(rollouts, np.arange(VOCAB), batch_tokens=128, length_grain=16, seed=(0, 0)))
    assert np.mean([batch.weights.mean() for batch in batches]) > 0.8
    assert np.mean([(batch.lengths > 0).mean() for batch in batches]) > 0.8
    # One shape per length, so that few steps are compiled.
    assert len({batch.tokens.shape for batch in batches}) == len({batch.tokens.shape[1] for batch in batches}) > 1


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_training(full_config, make_rows, train, monkeypatch):
    config, rows = full_config(), make_rows(synthetic_rollouts(100))
    real_step, steps = trainer.train_step, []

    def poisoned(*args):
        state, loss, parts = real_step(*args)
        steps.append(None)
        return state, loss * (np.nan if len(steps) >= 33 else 1), parts

    monkeypatch.setattr(trainer, "train_step", poisoned)
    with pytest.raises(ValueError, match="loss is nan at step 33: stopped"):
        train(config, rows)
    monkeypatch.undo()
    assert checkpoint_names(config) == ["step_00000020"]
    train(config, rows)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [{"data_shards": 4}, {"data_shards": 2, "param_shards": 2}])
def test_four_devices_train_as_one_does(full_config, make_rows, train, shards):
    """60 steps; the rounding of sums over shards differs by some units of the parameters' precision per step."""
    rows = make_rows(synthetic_rollouts(100))
    found = []
    for options in ({}, shards):
        config = full_config(optimizer={"kind": "muon", "schedule": "wsd"}, training=options)
        config = dataclasses.replace(config, output_dir=f"{config.output_dir}_{len(options)}")
        found.append((train(config, rows).params, read_lines(config)))
    (alone, lines), (split, split_lines) = found
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(split)) == ("param_shards" in shards)
    for one, other in zip(lines, split_lines, strict=True):
        assert one["step"] == other["step"]
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-4)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(other, one, atol=60 * 2**-23 * 20 * np.abs(one).max())


def test_too_few_devices_are_an_error(make_config, make_rows, train):
    with pytest.raises(ValueError, match="data_shards=64, param_shards=1: expected at most"):
        train(make_config(training={"data_shards": 64}), make_rows(synthetic_rollouts(10)))


@pytest.mark.slow
def test_accumulated_batches_are_one_step(full_config, make_rows, make_draft, train):
    """A step applies the mean gradient of two batches, and a killed run continues at a step."""
    config = full_config(training={"num_steps": 6, "accumulate": 2, "save_every": 2, "log_every": 2})
    rows = make_rows(synthetic_rollouts(100))
    whole = train(config, rows)
    assert [line["step"] for line in read_lines(config) if "loss" in line] == [2, 4, 6]
    assert_same(whole.params, train_with_a_kill(train, config, rows, 4)[0].params)

    # The mean gradient of the first step, computed here.
    draft, optimizer = make_draft(config), make_optimizer(config.optimizer, 6, 2)
    params = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    batches = list(
        epoch_batches(rows.trained([0, 1]), np.arange(VOCAB), batch_tokens=128, length_grain=32, seed=(0, 0))
    )
    weights = weights_at(config.loss, 1 / 6)

    @jax.jit
    def slope(params, batch):
        def loss(params):
            params = params | {"embedding": draft.params["embedding"]}
            return distillation_loss(dataclasses.replace(draft, params=params), batch, weights)[0]

        return jax.grad(loss)(params)

    mean = jax.tree.map(lambda a, b: (a + b) / 2, *(slope(params, batch) for batch in batches[:2]))
    alone = make_optimizer(config.optimizer, 6)
    expected, _ = jax.jit(alone.update)(mean, alone.init(params), params)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for batch in batches[:2]:
        found, state = update(slope(params, batch), state, params)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_patience_ends_the_training_and_the_best_draft_is_returned(full_config, make_rows, train, monkeypatch):
    config, rows = full_config(training={"save_every": 5, "patience": 2}), make_rows(synthetic_rollouts(100))
    efficiencies = iter([1.5, 2.0, 1.9, 1.8, 9.0])
    seen = []

    def measure(draft, rollouts, draft_len):
        seen.append(jax.tree.map(np.array, draft.params))
        return Agreement(10, 0.5, next(efficiencies))

    monkeypatch.setattr(trainer, "measure_agreement", measure)
    best = train(config, rows)
    assert len(seen) == 4
    assert_same(best.params, seen[1])
    # The best checkpoint is kept besides the last two, and a second run has nothing left to do.
    assert checkpoint_names(config) == ["step_00000010", "step_00000015", "step_00000020"]
    assert_same(train(config, rows).params, seen[1])
    assert len(seen) == 4


def test_a_checkpoint_that_cannot_be_begun_stops_the_training(full_config, make_rows, train, monkeypatch):
    config, rows = full_config(), make_rows(synthetic_rollouts(100))
    real = ocp.CheckpointManager.save

    def save(self, step, **options):
        if step == 40:
            raise OSError(28, "No space left on device")
        return real(self, step, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    with pytest.raises(ValueError, match=r"a checkpoint cannot be written .*No space left.*step_00000020"):
        train(config, rows)
    monkeypatch.undo()
    assert checkpoint_names(config) == ["step_00000020"]
    train(config, rows)


@pytest.mark.skipif(sys.platform != "linux", reason="uses a limit of Linux")
def test_a_checkpoint_that_cannot_be_written_stops_the_training(full_config, make_rows, train):
    """The background write fails, here at a limit on the size of files."""
    config, rows = full_config(), make_rows(synthetic_rollouts(100))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(line):
        if line.step == 35:
            wait_for(Path(config.output_dir, "checkpoints", "step_00000020"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(ValueError, match=r"a checkpoint cannot be written .*step_00000020"):
            train(config, rows, progress=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint_names(config) == ["step_00000020"]
    wait_until_unchanged(Path(config.output_dir))
    train(config, rows)
    assert checkpoint_names(config) == ["step_00000040", "step_00000060"]


def test_a_checkpoint_has_its_name_as_soon_as_it_is_written(tmp_path):
    """Not when the next one is due, because the run may be killed before."""
    state, position = {"weight": jnp.arange(6.0)}, TrainPosition(5, 0, 2, [0, 1])
    with TrainingCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(position, state)
        wait_for(tmp_path / "step_00000005")
        with TrainingCheckpoints(tmp_path) as others:
            found = others.load(state)
    assert found is not None and found[0] == position
    np.testing.assert_array_equal(found[1]["weight"], state["weight"])


@pytest.mark.slow
def test_a_draft_that_reads_hidden_states_learns_from_them(full_config, make_rows, train, target):
    """The target's hidden state determines the next token, which does not depend on the tokens before it."""
    random = np.random.default_rng(0)
    table = random.normal(size=(VOCAB, target.config.width)).astype(np.float16)
    rollouts = []
    for row in synthetic_rollouts(200):
        response = random.integers(0, VOCAB, len(row.response)).astype(np.int32)
        sequence = np.concatenate([row.prompt, response])
        # The state at a token determines the token after the next one: the first draft is known, no later one.
        ahead = np.append(sequence[2:], 0)
        ids = np.concatenate([response[:, None], row.distribution_ids[:, 1:]], axis=1)
        rollouts.append(row._replace(response=response, distribution_ids=ids, hidden=table[ahead]))
    config = full_config(
        draft={"reads_hidden": True},
        training={"num_steps": 150, "save_every": 150},
        loss={"soft_weight": 0.0, "hard_weight": 1.0, "hidden_weight": 0.1, "unroll": 1},
    )
    rows = make_rows(rollouts)
    measured = measure_agreement(train(config, rows), rows.held_out(rows.shards()), 4)
    assert measured.agreement > 0.8
    assert 1.6 < measured.tokens_per_pass < 2.1
    with pytest.raises(ValueError, match="the corpus has no hidden states"):
        trainer.rows_with_hidden(synthetic_rollouts(3))


@pytest.mark.slow
def test_a_batch_of_the_drafts_answers_is_scored_by_the_target(make_config, make_draft, target):
    """The tokens are the draft's, the labels the target's; the same arguments give the same batch."""
    config = make_config(training={"on_policy_share": 1.0})
    draft = make_draft(config)
    columns = output_columns(np.asarray(draft.output_ids), VOCAB)
    batch = make_batch(synthetic_rollouts(3), columns, 32, 64, 3)

    def replaced():
        return on_policy_batch(config, batch, TrainPosition(1, 0, 1, [0]), draft, target, columns)

    found = replaced()
    assert_same(found, replaced())
    np.testing.assert_array_equal(found.lengths, batch.lengths)
    for row in range(3):
        is_of_row = found.selected[: int(found.weights.sum())] // 32 == row
        first = int(found.selected[: len(is_of_row)][is_of_row][0]) % 32 + 1
        text = found.tokens[row, : found.lengths[row]].tolist()
        assert text[:first] == batch.tokens[row, :first].tolist()
        labels = found.labels[: len(is_of_row)][is_of_row]
        for place, label in zip(range(first, len(text) + 1), labels, strict=True):
            if place < len(text):
                assert text[place] == next_token(draft, text[:place])
            assert label == columns[next_token(target, text[:place])]


def test_answers_of_a_draft_that_reads_hidden_states_are_refused(make_config):
    with pytest.raises(ValueError, match=r"on_policy_share=1\.0: expected 0"):
        make_config(training={"on_policy_share": 1.0}, draft={"reads_hidden": True})


@pytest.mark.slow
def test_a_killed_run_on_the_drafts_answers_continues_bit_for_bit(make_config, make_rows, train):
    config = make_config(training={"on_policy_share": 0.5, "num_steps": 12, "save_every": 6, "log_every": 3})
    rows = make_rows(synthetic_rollouts(60))
    whole = train(config, rows)
    assert_same(whole.params, train_with_a_kill(train, config, rows, 9)[0].params)


def test_an_empty_corpus_is_refused(make_config, make_rows, train):
    with pytest.raises(ValueError, match="the corpus is empty"):
        train(make_config(), make_rows([]))


@pytest.mark.slow
def test_a_checkpoint_of_another_draft_is_refused(full_config, make_rows, train):
    rows = make_rows(synthetic_rollouts(50))
    train(full_config(training={"num_steps": 20}), rows)
    with pytest.raises(ValueError, match=r"step_00000020: not a checkpoint of this training, or of a draft of another"):
        train(full_config(training={"num_steps": 20}, draft={"mlp_width": 48}), rows)


def test_without_a_checkpoint_there_is_no_trained_draft(full_config, make_rows, train):
    with pytest.raises(ValueError, match="no training checkpoint here: run the train stage first"):
        train(full_config(), make_rows(synthetic_rollouts(10)), load_only=True)
