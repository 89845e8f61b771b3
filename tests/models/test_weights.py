"""Products with weights: one row is summed in parts on a CPU, and comes out as any other row does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.models.weights import product


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def num_batched(function, *args):
    """Products of `function` that have a batch axis."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return sum(bool(eqn.params["dimension_numbers"][1][0]) for eqn in eqns if eqn.primitive.name == "dot_general")


@pytest.mark.parametrize("width", [7, 30, 64])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1), (1, 5)])
def test_rows_come_out_as_the_matrix_product(rows, width):
    x, values = draw(0, *rows, width), draw(1, width, 3, 4)
    found = product(x, values)
    assert found.shape == (*rows, 3, 4) and found.dtype == jnp.float32
    expected = np.einsum("...d,dnh->...nh", np.asarray(x, np.float64), np.asarray(values, np.float64))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("rows", "width", "expected"), [(1, 64, 1), (1, 30, 1), (1, 7, 0), (2, 64, 0)])
def test_only_one_row_is_cut_and_only_into_equal_parts(rows, width, expected):
    assert num_batched(product, draw(0, 1, rows, width), draw(1, width, 8)) == expected


def test_a_narrower_result():
    x, values = draw(0, 1, 64), draw(1, 64, 8)
    found = product(x, values, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), x @ values, rtol=0.02, atol=0.05)


def test_bfloat16_is_left_whole():
    x, values = draw(0, 1, 64, dtype=jnp.bfloat16), draw(1, 64, 8, dtype=jnp.bfloat16)
    assert num_batched(product, x, values) == 0


def test_a_mesh_is_left_to_cut_by_itself():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert num_batched(product, draw(0, 1, 64), draw(1, 64, 8)) == 0
