"""Where drafts start: from the target's layers, and from its way of scoring."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.training.distill_config import DraftConfig
from bass_jax.training.init_draft import init_draft, with_hidden, with_layers, with_output_ids
from tests.training.conftest import VOCAB

IDS = np.arange(3, 43, dtype=np.int32)


def score(model, tokens):
    positions = jnp.arange(tokens.shape[1])[None]
    return jax.jit(lambda model, tokens: model.forward(tokens, positions, model.init_cache(*tokens.shape)).logits)(
        model, tokens
    )


def test_all_the_targets_layers_are_the_target(target):
    shape = DraftConfig(target_layers=(0, 1), output_vocab_size=len(IDS))
    draft = init_draft(shape, target, IDS, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (1, 16)), jnp.int32)
    np.testing.assert_allclose(score(draft, tokens), score(target, tokens)[..., IDS], atol=1e-5)


def test_some_of_the_targets_layers(target):
    draft = init_draft(DraftConfig(target_layers=(1,), output_vocab_size=None), target, IDS, jax.random.key(0))
    assert draft.config.num_layers == 1 and draft.output_ids is None
    for one, other in zip(
        jax.tree.leaves(draft.params["layer_0"]), jax.tree.leaves(target.params["layer_1"]), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="target_layers: 2: the target has layers 0 to 1"):
        init_draft(DraftConfig(target_layers=(2,)), target, IDS, jax.random.key(0))


def test_a_hidden_state_draft_scores_what_it_foretells_as_its_target_would(make_config, make_draft, target):
    """Its width holds all directions here, so nothing is lost."""
    draft = make_draft(make_config(draft={"reads_hidden": True}), np.arange(48, dtype=np.int32))
    state = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, target.config.width)), jnp.float32)
    hidden_states = state @ draft.params["hidden_output"].T
    np.testing.assert_allclose(draft.next_hidden(hidden_states), state, atol=1e-4)
    np.testing.assert_allclose(draft.logits(hidden_states), target.logits(state)[..., :48], atol=1e-4)


def test_a_draft_that_read_tokens_says_the_same_once_it_reads_hidden_states(make_config, make_draft, target):
    """Whatever the states are; and what it learns of them can change that."""
    draft = make_draft(make_config(), np.arange(48, dtype=np.int32))
    reader = with_hidden(draft, target.config)
    assert reader.config.hidden_width == target.config.width
    rng = np.random.default_rng(2)
    tokens, positions = jnp.asarray(rng.integers(0, VOCAB, (2, 12)), jnp.int32), jnp.tile(jnp.arange(12), (2, 1))
    states = jnp.asarray(rng.normal(size=(2, 12, target.config.width)), jnp.float32)
    said = draft.hidden_states(tokens, positions, draft.init_cache(2, 12)).hidden

    def hidden_states(params):
        model = dataclasses.replace(reader, params=params)
        return model.hidden_states(tokens, positions, reader.init_cache(2, 12), states).hidden

    np.testing.assert_array_equal(hidden_states(reader.params), said)
    slope = jax.grad(lambda params: jnp.square(hidden_states(params)).sum())(reader.params)["hidden_projection"]
    assert np.abs(slope).max() > 0


@pytest.mark.parametrize("num_layers", [2, 3, 5])
def test_a_draft_with_more_layers_says_the_same(make_config, make_draft, num_layers):
    """And every new layer learns from the first step on."""
    draft = make_draft(make_config(draft={"num_layers": 2}), np.arange(48, dtype=np.int32))
    deeper = with_layers(draft, num_layers)
    assert deeper.config.num_layers == num_layers
    rng = np.random.default_rng(3)
    tokens, positions = jnp.asarray(rng.integers(0, VOCAB, (2, 12)), jnp.int32), jnp.tile(jnp.arange(12), (2, 1))
    said = draft.hidden_states(tokens, positions, draft.init_cache(2, 12)).hidden

    def hidden_states(params):
        model = dataclasses.replace(deeper, params=params)
        return model.hidden_states(tokens, positions, deeper.init_cache(2, 12)).hidden

    np.testing.assert_array_equal(hidden_states(deeper.params), said)
    slopes = jax.grad(lambda params: jnp.square(hidden_states(params) - 1).sum())(deeper.params)
    for place in range(num_layers):
        layer = slopes[f"layer_{place}"]
        assert np.abs(layer["attention"]["out"]).max() > 0 and np.abs(layer["mlp"]["down"]).max() > 0
    with pytest.raises(ValueError, match="num_layers=1: the draft has 2"):
        with_layers(draft, 1)


def test_a_draft_with_more_tokens_scores_those_that_it_had_as_before(make_config, make_draft):
    """And the others as their embeddings say, where its head is a map of embeddings."""
    draft = make_draft(make_config(), np.arange(3, 43, dtype=np.int32))
    rng = np.random.default_rng(4)
    embedding = np.asarray(draft.params["embedding"])
    mapped = rng.normal(size=(draft.config.width, len(embedding))) @ embedding
    draft = dataclasses.replace(draft, params=draft.params | {"head": jnp.asarray(mapped[:, 3:43], jnp.float32)})
    ids = np.arange(0, 48, dtype=np.int32)
    larger = with_output_ids(draft, ids)
    assert larger.config.output_vocab_size == 48
    np.testing.assert_array_equal(larger.output_ids, ids)
    head = larger.params["head"]
    np.testing.assert_array_equal(head[:, 3:43], draft.params["head"])
    np.testing.assert_allclose(head, mapped[:, :48], atol=0.02 * np.abs(mapped).max())
    # Any order, and fewer.
    other = with_output_ids(draft, np.array([45, 7], np.int32))
    np.testing.assert_allclose(other.params["head"], np.stack([head[:, 45], head[:, 7]], axis=1), atol=1e-6)
