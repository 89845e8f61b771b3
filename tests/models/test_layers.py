"""Equal layers are traced and lowered once, which shortens compilation."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests import tiny


@pytest.mark.parametrize(
    ("changes", "num_kinds"),
    [
        ({"num_layers": 5}, 1),
        ({"num_layers": 4, "window": 4, "windowed_layers": (False, True, False, True)}, 2),
    ],
)
def test_equal_layers_are_lowered_once(changes, num_kinds):
    model = tiny.model(0, **changes)
    tokens = jnp.zeros((1, 3), jnp.int32)
    positions = jnp.arange(3)[None]
    text = jax.jit(type(model).forward).lower(model, tokens, positions, model.init_cache(1, 8)).as_text()
    assert len(re.findall(r"func private @_run_layer", text)) == num_kinds
    assert len(re.findall(r"call @_run_layer", text)) == changes["num_layers"]
