"""Given parameters must have the shapes that their layers declare."""

import jax
import jax.numpy as jnp
import pytest

from bass_jax.models import Model
from tests import tiny


def test_a_parameter_of_another_shape_is_refused():
    """Flax checks only parameters that it initializes; `declare` checks given ones."""
    model = tiny.model(1, num_layers=1)
    params = model.params | {"final_norm": jax.tree.map(lambda leaf: leaf[:-1], model.params["final_norm"])}
    tokens = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"final_norm.*: shape .*; expected"):
        Model(params, model.config).forward(tokens, tokens, model.init_cache(1, 8))
