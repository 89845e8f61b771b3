"""Every value of `ModelConfig.attention_implementation` gives the same logits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny


@pytest.mark.parametrize("attention", ["pad", "split", "xla"])
def test_implementations_agree(attention):
    model = tiny.model(0)
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, attention_implementation=attention))
    tokens, positions = jnp.array([[3, 1, 4], [1, 5, 9]]), jnp.array([[0, 1, 2], [0, 1, 64]])
    expected, *_ = model.forward(tokens, positions, model.init_cache(2, 64))
    found, *_ = other.forward(tokens, positions, other.init_cache(2, 64))
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    np.testing.assert_allclose(found[1, :2], expected[1, :2], atol=1e-6)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="attention_implementation='paged': expected one of 'ragged'"):
        tiny.config(attention_implementation="paged")
