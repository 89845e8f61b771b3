"""Hidden states of chosen layers: a model that ends before a layer computes the input of that layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from tests import tiny

TOKENS = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 0]], jnp.int32)
POSITIONS = jnp.asarray([[0, 1, 2, 3, 4], [0, 1, 2, 3, 16]], jnp.int32)


@pytest.fixture(scope="module")
def target():
    return tiny.model(1, num_layers=3)


def first_layers(target, num):
    """Returns the hidden states after `num` layers, before the final norm."""
    if num == 0:
        return target.params["embedding"][TOKENS]
    config = dataclasses.replace(target.config, layers=target.config.layers[:num], final_norm=None)
    model = dataclasses.replace(target, config=config)
    return model.hidden_states(TOKENS, POSITIONS, model.init_cache(2, 16)).hidden


def test_chosen_hidden_states_are_inputs_of_layers(target):
    layers = (3, 0, 2)
    expected = jnp.concatenate([first_layers(target, num) for num in layers], axis=-1)
    plain = target.forward(TOKENS, POSITIONS, target.init_cache(2, 16))
    output = target.forward(TOKENS, POSITIONS, target.init_cache(2, 16), hidden_layers=layers)
    without_head = target.hidden_states(TOKENS, POSITIONS, target.init_cache(2, 16), hidden_layers=layers)
    is_token = np.asarray(POSITIONS < 16)
    for found in (output.hidden, without_head.hidden):
        np.testing.assert_allclose(found[is_token], expected[is_token], atol=1e-5)
    np.testing.assert_allclose(output.logits, plain.logits, atol=1e-5)
    assert plain.hidden.shape == (2, 5, target.config.width)
    np.testing.assert_allclose(target.logits(plain.hidden), plain.logits, atol=1e-5)


@pytest.mark.parametrize("layers", [(4,), (-1,), (True,)])
def test_unknown_layers_are_refused(target, layers):
    with pytest.raises(ValueError, match="expected a tuple of integers from 0 to 3"):
        jax.eval_shape(lambda: target.forward(TOKENS, POSITIONS, target.init_cache(2, 16), hidden_layers=layers))


def test_an_ensemble_asks_for_what_its_parts_read(target):
    drafter = tiny.ensemble_drafter(tiny.eagle_drafter(target))
    assert drafter.reads_hidden_states
    assert drafter.hidden_layers == ()
    assert bass.drafters.hidden_layers_of(bass.drafters.NgramDrafter()) == ()
