"""Products with weights: the split sum of a single row on CPUs, and rounded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.models.weights import product


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def num_batched(function, *args):
    """Returns the number of products in `function` that have a batch axis."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return sum(bool(eqn.params["dimension_numbers"][1][0]) for eqn in eqns if eqn.primitive.name == "dot_general")


@pytest.mark.parametrize("width", [7, 30, 64])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1), (1, 5)])
def test_products_are_those_of_numpy(rows, width):
    x, values = draw(0, *rows, width), draw(1, width, 3, 4)
    found = product(x, values)
    assert found.shape == (*rows, 3, 4) and found.dtype == jnp.float32
    expected = np.einsum("...d,dnh->...nh", np.asarray(x, np.float64), np.asarray(values, np.float64))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("rows", "width", "expected"), [(1, 64, 1), (1, 30, 1), (1, 7, 0), (2, 64, 0)])
def test_only_a_single_row_is_split_into_equal_parts(rows, width, expected):
    assert num_batched(product, draw(0, 1, rows, width), draw(1, width, 8)) == expected


def test_the_result_can_be_bfloat16():
    x, values = draw(0, 1, 64), draw(1, 64, 8)
    found = product(x, values, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), x @ values, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("rows", [1, 6])
def test_rounded_inputs_are_summed_in_float32(rows):
    """The inputs of the gradient with respect to a weight are not rounded."""
    x, values, gradient = draw(0, rows, 64), draw(1, 64, 2, 4), draw(2, rows, 2, 4)
    found, pull = jax.vjp(lambda x, values: product(x, values, rounds_to="bfloat16"), x, values)
    of_x, of_values = pull(gradient)

    def rounded(x):
        return np.asarray(x.astype(jnp.bfloat16), np.float64)

    assert found.dtype == of_x.dtype == of_values.dtype == jnp.float32
    np.testing.assert_allclose(found, np.einsum("md,dnh->mnh", rounded(x), rounded(values)), atol=1e-5)
    np.testing.assert_allclose(of_x, np.einsum("mnh,dnh->md", rounded(gradient), rounded(values)), atol=1e-5)
    np.testing.assert_allclose(of_values, np.einsum("md,mnh->dnh", x, gradient), atol=1e-5)
    assert np.abs(found - product(x, values)).max() > 1e-3


def test_bfloat16_inputs_are_not_rounded():
    x, values = draw(0, 3, 64, dtype=jnp.bfloat16), draw(1, 64, 8, dtype=jnp.bfloat16)
    found = product(x, values, rounds_to="bfloat16")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, product(x, values))


def test_a_bfloat16_row_is_not_split():
    x, values = draw(0, 1, 64, dtype=jnp.bfloat16), draw(1, 64, 8, dtype=jnp.bfloat16)
    assert num_batched(product, x, values) == 0


def test_a_row_on_a_mesh_is_not_split():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert num_batched(product, draw(0, 1, 64), draw(1, 64, 8)) == 0
