"""The loss against sums in Python, and weights that change during training."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.drafters import DraftContext, PEagleDrafter
from bass_jax.drafters.network_drafter import network_drafter
from bass_jax.models.decoder import decoder
from bass_jax.sampling import LogitsProcessors, SamplingParams
from bass_jax.training.batches import make_batch
from bass_jax.training.distill_config import LossConfig
from bass_jax.training.draft_vocabulary import output_columns
from bass_jax.training.init_draft import init_eagle3
from bass_jax.training.loss import LossWeights, distillation_loss, response_hidden, response_logits, weights_at
from bass_jax.training.rollout import Rollout
from bass_jax.training.rollout import with_hidden as rollouts_with_hidden
from tests.training.conftest import VOCAB, synthetic_rollouts

NAMES = LossWeights._fields


def one_hot(name) -> LossWeights:
    return LossWeights(*(np.float32(other == name) for other in NAMES))


@jax.jit
def loss_and_gradient(draft, params, batch, weights):
    """Compiled once for all weights."""

    def loss(params):
        return distillation_loss(dataclasses.replace(draft, params=params), batch, weights)

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.fixture
def draft(make_config, make_draft):
    return make_draft(make_config())


@pytest.fixture
def batch(draft):
    """48 of 64 tokens can be proposed, so a part of the target's distribution is outside."""
    batch = make_batch(synthetic_rollouts(3), output_columns(np.asarray(draft.output_ids), VOCAB), 32, 64, 3)
    return jax.tree.map(jnp.asarray, batch)


def test_the_parts_equal_sums_in_python(draft, batch):
    (_, parts), _ = loss_and_gradient(draft, draft.params, batch, one_hot("soft"))
    distributions = np.asarray(jax.nn.softmax(jax.jit(response_logits)(draft, batch)), np.float64)
    batch = jax.device_get(batch)
    found = dict.fromkeys(("soft", "hard", "reverse", "total_variation"), 0.0)
    assert 0 < (batch.distribution_columns < 0).mean() < 0.5
    for place in np.flatnonzero(batch.weights):
        columns = np.asarray(batch.distribution_columns[place])
        inside = columns >= 0
        target = np.asarray(batch.distribution_probs[place])[inside] * batch.distribution_mass[place]
        own = distributions[place, columns[inside]]
        both = np.append(target, 1 - target.sum()), np.append(own, 1 - own.sum())
        found["soft"] -= (np.asarray(batch.distribution_probs[place])[inside] * np.log(own)).sum()
        if batch.labels[place] >= 0:
            found["hard"] -= np.log(distributions[place, batch.labels[place]])
        found["reverse"] += (both[1] * np.log(both[1] / np.maximum(both[0], 1e-6))).sum()
        found["total_variation"] += np.abs(both[0] - both[1]).sum() / 2
    for name, value in found.items():
        assert float(getattr(parts, name)) == pytest.approx(value / float(batch.weights.sum()), rel=1e-4), name


@pytest.mark.parametrize("name", ["soft", "hard", "reverse", "total_variation"])
def test_the_loss_is_its_part_and_decreases_along_its_gradient(draft, batch, name):
    (loss, parts), gradient = loss_and_gradient(draft, draft.params, batch, one_hot(name))
    assert loss == getattr(parts, name)
    moved = jax.tree.map(lambda leaf, slope: leaf - 0.05 * slope, draft.params, gradient)
    (moved_loss, _), _ = loss_and_gradient(draft, moved, batch, one_hot(name))
    assert moved_loss < loss


def test_weights_follow_their_schedules():
    config = LossConfig(
        soft_weight=((0.0, 1.0), (0.5, 0.0)), hard_weight=0.25, total_variation_weight=((0.5, 0), (1, 2))
    )
    for share, expected in ((0.0, (1, 0.25, 0, 0, 0)), (0.25, (0.5, 0.25, 0, 0, 0)), (0.75, (0, 0.25, 0, 1, 0))):
        np.testing.assert_allclose(weights_at(config, share), expected)


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"soft_weight": -1.0}, "soft_weight=-1.0"),
        ({"soft_weight": 0.0, "hard_weight": 0.0}, "not all 0"),
        ({"reverse_weight": ((0.5, 1.0), (0.1, 1.0))}, "reverse_weight=.*ascending"),
        ({"unroll": 0}, "unroll=0"),
    ],
)
def test_impossible_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**weights)


def with_hidden(rollouts, width, seed=5) -> list[Rollout]:
    """Gives rollouts hidden states that are a fixed function of the token."""
    table = np.random.default_rng(seed).normal(size=(VOCAB, width)).astype(np.float16)
    return [row._replace(hidden=table[row.inputs]) for row in rollouts]


def test_which_positions_read_predicted_hidden_states(make_config, make_draft, target):
    """The first of three passes reads true hidden states, the last also states predicted from the pass before it."""
    draft = make_draft(make_config(draft={"reads_hidden": True}))
    rows = with_hidden(synthetic_rollouts(2), target.config.width)
    batch = make_batch(rows, output_columns(np.asarray(draft.output_ids), VOCAB), 32, 64, 2, reads_hidden=True)
    batch = jax.tree.map(jnp.asarray, batch)
    module, variables = decoder(draft.config), {"params": draft.params}
    positions = jnp.where(jnp.arange(32) < batch.lengths[:, None], jnp.arange(32), 32)
    truth = np.asarray(batch.hidden, np.float32)
    before = np.pad(truth, ((0, 0), (1, 0), (0, 0)))[:, :-1]

    @jax.jit
    def run(hidden):
        states = module.apply(variables, batch.tokens, positions, None, 1, hidden, method="hidden_states").hidden
        return states, module.apply(variables, states, method="next_hidden")

    inputs, expected = before.copy(), []
    for _ in range(2):
        states, predicted = run(inputs)
        expected.append(states)
        for row in range(2):
            for place in range(32):
                if (place + row) % 6 > 3:
                    inputs[row, place] = predicted[row, place - 1] if place else 0
    last, _ = run(inputs)
    found, seen = jax.jit(response_hidden, static_argnums=2)(draft, batch, 3)
    is_real = batch.weights > 0
    for rows_found, pass_expected in zip(found, (expected[0], last), strict=True):
        flat = np.asarray(pass_expected).reshape(-1, draft.config.width)
        np.testing.assert_allclose(rows_found[is_real], flat[batch.selected[is_real]], atol=1e-5)
    assert not np.allclose(found[0][is_real], found[1][is_real], atol=1e-3)
    np.testing.assert_array_equal(seen[is_real], truth.reshape(-1, truth.shape[-1])[batch.selected[is_real]])


def test_an_eagle3_head_reads_whole_sequences_as_it_drafts(make_config, target):
    """Training needs no cache; its first pass is the one that fills the drafter's cache."""
    shape = make_config(draft={"kind": "eagle3", "width": 16, "hidden_layers": [0, 2, 1]}).draft
    draft = init_eagle3(shape, target, np.arange(48), jax.random.key(0))
    rows = rollouts_with_hidden(synthetic_rollouts(3), target, (0, 2, 1))
    batch = make_batch(rows, np.arange(VOCAB), 32, 64, 3, reads_hidden=True)
    positions = np.where(np.arange(32) < batch.lengths[:, None], np.arange(32), 64)

    @jax.jit
    def read(draft):
        before = jnp.pad(draft.project(jnp.asarray(batch.hidden)), ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return draft.hidden_states(
            jnp.asarray(batch.tokens), jnp.asarray(positions), draft.init_cache(3, 64), before
        ).hidden

    (found,), _ = jax.jit(response_hidden)(draft, batch)
    is_real = batch.weights > 0
    expected = np.asarray(read(draft)).reshape(-1, 16)[batch.selected]
    np.testing.assert_allclose(found[is_real], expected[is_real], atol=1e-5)
    # In the last of three passes, some positions read the head's own outputs.
    first, last = jax.jit(response_hidden, static_argnums=2)(draft, batch, 3)[0]
    assert not np.allclose(first[is_real], last[is_real], atol=1e-3)


@pytest.mark.slow
def test_a_p_eagle_head_is_trained_on_what_it_drafts_from(make_config, target):
    """The logits at a run of masks are those of the drafter's masks after the same tokens."""
    shape = make_config(draft={"kind": "peagle", "width": 16, "hidden_layers": [0, 1], "output_vocab_size": None}).draft
    draft = init_eagle3(shape, target, np.arange(VOCAB), jax.random.key(0))
    rows = rollouts_with_hidden(synthetic_rollouts(20)[-1:], target, (0, 1))
    batch = make_batch(rows, np.arange(VOCAB), 32, 64, 1, reads_hidden=True)
    masked = jax.jit(response_hidden, static_argnums=2)(draft, batch, 3)[0][1]
    probs = np.asarray(jax.nn.softmax(draft.logits(masked[None])[0]))
    # With three drafts, positions 4 and 5 are the first masks: drafts 2 and 3 after the tokens at 0 to 3.
    lengths = jnp.array([4])
    tokens = jnp.pad(jnp.asarray(batch.tokens), ((0, 0), (0, 32)))
    hidden = jnp.pad(jnp.asarray(batch.hidden), ((0, 0), (0, 32), (0, 0)))
    context = DraftContext(
        tokens=tokens,
        lengths=lengths,
        num_wanted=jnp.array([3]),
        sampling_arrays=SamplingParams(temperature=1.0).sampling_arrays(1, VOCAB),
        keys=jnp.broadcast_to(jax.random.key(0), (1, 3)),
        processors=LogitsProcessors(None, lengths, jnp.full((1, 1), -1)),
    )
    drafter = network_drafter(draft, VOCAB)
    assert isinstance(drafter, PEagleDrafter)

    @jax.jit
    def propose(drafter, context):
        return drafter.propose(drafter.init(tokens, lengths, hidden), context, 3, is_sampled=True)[0].probs

    drafted = np.asarray(propose(drafter, context))[0]
    first = len(rows[0].prompt) - 1
    assert first <= 4
    np.testing.assert_allclose(probs[[4 - first, 5 - first]], drafted[1:], atol=1e-5)


def test_rows_without_hidden_states_are_refused():
    with pytest.raises(ValueError, match="without the target's hidden states"):
        make_batch(synthetic_rollouts(2), np.arange(VOCAB), 32, 64, 2, reads_hidden=True)


def test_a_product_dtype_applies_to_every_product_with_a_weight(draft, batch):
    """Two of its three products: the forward pass, and the gradient by the activations."""
    num_weights = sum(leaf.ndim > 1 for leaf in jax.tree.leaves(draft.params)) - 1  # The embedding is not multiplied.

    def num_rounded(product_dtype):
        config = dataclasses.replace(draft.config, product_dtype=product_dtype)
        changed = dataclasses.replace(draft, config=config)
        lowered = loss_and_gradient.lower(changed, draft.params, batch, one_hot("soft")).as_text()
        return len(re.findall(r"dot_general .*: \(tensor<[0-9x]*xbf16>, tensor<[0-9x]*xbf16>\)", lowered))

    assert num_rounded(None) == 0
    assert num_rounded("bfloat16") == 2 * num_weights
