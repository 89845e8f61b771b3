"""Initial drafts, and changes to a draft that keep its predictions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.training.distill_config import DraftConfig
from bass_jax.training.init_draft import add_hidden_input, add_layers, change_output_ids, init_draft
from tests.training.conftest import VOCAB

IDS = np.arange(3, 43, dtype=np.int32)
ROWS, LENGTH = 2, 12


@jax.jit
def run(model, tokens, hidden=None):
    """Returns hidden states and logits of a fresh pass."""
    positions = jnp.tile(jnp.arange(tokens.shape[1]), (len(tokens), 1))
    arguments = (tokens, positions, model.init_cache(*tokens.shape), *([] if hidden is None else [hidden]))
    states = model.hidden_states(*arguments).hidden
    return states, model.logits(states)


@jax.jit
def gradient(model, tokens, hidden=None):
    """Returns the gradient of a loss by the parameters."""
    return jax.grad(
        lambda params: jnp.square(run(dataclasses.replace(model, params=params), tokens, hidden)[0] - 1).sum()
    )(model.params)


@pytest.fixture
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH)), jnp.int32)


@pytest.mark.slow
def test_all_layers_of_the_target_are_the_target(target, tokens):
    shape = DraftConfig(target_layers=(0, 1), output_vocab_size=len(IDS))
    draft = init_draft(shape, target, IDS, jax.random.key(0))
    np.testing.assert_allclose(run(draft, tokens)[1], run(target, tokens)[1][..., IDS], atol=1e-5)


def test_some_layers_of_the_target(target):
    draft = init_draft(DraftConfig(target_layers=(1,), output_vocab_size=None), target, IDS, jax.random.key(0))
    assert draft.config.num_layers == 1 and draft.output_ids is None
    layers = draft.params["layer_0"], target.params["layer_1"]
    for one, other in zip(*map(jax.tree.leaves, layers), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="target_layers: 2: the target has layers 0 to 1"):
        init_draft(DraftConfig(target_layers=(2,)), target, IDS, jax.random.key(0))


def test_a_draft_scores_predicted_hidden_states_as_its_target(make_config, make_draft, target):
    """Its width holds all directions here, so nothing is lost."""
    draft = make_draft(make_config(draft={"reads_hidden": True}))
    state = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, target.config.width)), jnp.float32)
    hidden = state @ draft.params["hidden_output"]
    np.testing.assert_allclose(draft.next_hidden(hidden), state, atol=1e-4)
    np.testing.assert_allclose(draft.logits(hidden), target.logits(state)[..., :48], atol=1e-4)


def test_hidden_states_as_a_new_input_change_nothing_at_first(make_config, make_draft, target, tokens):
    """For all hidden states; and the draft learns from them from the first step on."""
    draft = make_draft(make_config())
    reader = add_hidden_input(draft, target.config)
    assert reader.config.hidden_width == target.config.width
    hidden = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, LENGTH, target.config.width)), jnp.float32)
    np.testing.assert_array_equal(run(reader, tokens, hidden)[0], run(draft, tokens)[0])
    assert np.abs(gradient(reader, tokens, hidden)["hidden_projection"]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [2, 3, 5])
def test_new_layers_change_nothing_at_first(make_config, make_draft, tokens, num_layers):
    """And each of them learns from the first step on."""
    draft = make_draft(make_config(draft={"num_layers": 2}))
    deeper = add_layers(draft, num_layers)
    assert deeper.config.num_layers == num_layers
    np.testing.assert_array_equal(run(deeper, tokens)[0], run(draft, tokens)[0])
    slopes = gradient(deeper, tokens)
    for place in range(num_layers):
        layer = slopes[f"layer_{place}"]
        assert np.abs(layer["attention"]["out"]).max() > 0 and np.abs(layer["mlp"]["down"]).max() > 0
    with pytest.raises(ValueError, match="num_layers=1: the draft has 2"):
        add_layers(draft, 1)


def test_new_output_tokens_keep_the_scores_of_the_others(make_config, make_draft):
    """The new scores are exact if the head is a linear map of the embeddings."""
    draft = make_draft(make_config(draft={"output_vocab_size": 40}), IDS)
    embedding = np.asarray(draft.params["embedding"])
    mapped = embedding @ np.random.default_rng(4).normal(size=(embedding.shape[1], draft.config.width))
    draft = dataclasses.replace(draft, params=draft.params | {"head": jnp.asarray(mapped[IDS], jnp.float32)})
    ids = np.arange(0, 48, dtype=np.int32)
    larger = change_output_ids(draft, ids)
    assert larger.config.output_vocab_size == 48
    np.testing.assert_array_equal(larger.output_ids, ids)
    head = larger.params["head"]
    np.testing.assert_array_equal(head[IDS], draft.params["head"])
    np.testing.assert_allclose(head, mapped[:48], atol=0.02 * np.abs(mapped).max())
    # In any order, and fewer.
    other = change_output_ids(draft, np.array([45, 7], np.int32))
    np.testing.assert_allclose(other.params["head"], head[np.array([45, 7])], atol=1e-6)
