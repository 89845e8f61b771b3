"""Products with weights, and rounded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.models.weights import product
from bass_jax.runtime import cpu_workarounds


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def primitives(*args):
    """Returns the names of the operations of a product, and the batch axes of its ``dot_general``."""
    eqns = jax.make_jaxpr(product)(*args).eqns
    (dot,) = (eqn for eqn in eqns if eqn.primitive.name == "dot_general")
    return {eqn.primitive.name for eqn in eqns}, dot.params["dimension_numbers"][1][0]


@pytest.mark.parametrize("width", [7, 30, 64])
@pytest.mark.parametrize("columns", [(3, 4), (7, 1)])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1), (1, 5), (3, 4), (80,)])
def test_products_are_those_of_numpy(rows, columns, width):
    """One row, few rows with and without padding, and many."""
    x, values = draw(0, *rows, width), draw(1, *columns, width)
    found = product(x, values)
    assert found.shape == (*rows, *columns) and found.dtype == jnp.float32
    expected = np.einsum("...d,nhd->...nh", np.asarray(x, np.float64), np.asarray(values, np.float64))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_one_row_is_a_batch_of_parts_and_few_rows_are_the_right_operand(monkeypatch):
    monkeypatch.setattr(cpu_workarounds, "_has_instructions", lambda name: False)
    values = draw(1, 8, 64)
    assert primitives(draw(0, 1, 64), values)[1] == (0,)
    for rows, has_barrier in ((2, True), (64, True), (65, False)):
        names, batch_axes = primitives(draw(0, rows, 64), values)
        assert batch_axes == () and ("optimization_barrier" in names) == has_barrier


@pytest.mark.parametrize("rows", [1, 3])
def test_the_result_can_be_bfloat16(rows):
    x, values = draw(0, rows, 64), draw(1, 8, 64)
    found = product(x, values, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), x @ values.T, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("rows", [1, 6])
def test_rounded_inputs_are_summed_in_float32(rows):
    """The inputs of the gradient with respect to a weight are not rounded."""
    x, values, gradient = draw(0, rows, 64), draw(1, 2, 4, 64), draw(2, rows, 2, 4)
    found, pull = jax.vjp(lambda x, values: product(x, values, rounds_to="bfloat16"), x, values)
    of_x, of_values = pull(gradient)

    def rounded(x):
        return np.asarray(x.astype(jnp.bfloat16), np.float64)

    assert found.dtype == of_x.dtype == of_values.dtype == jnp.float32
    np.testing.assert_allclose(found, np.einsum("md,nhd->mnh", rounded(x), rounded(values)), atol=1e-5)
    np.testing.assert_allclose(of_x, np.einsum("mnh,nhd->md", rounded(gradient), rounded(values)), atol=1e-5)
    np.testing.assert_allclose(of_values, np.einsum("md,mnh->nhd", x, gradient), atol=1e-5)
    assert np.abs(found - product(x, values)).max() > 1e-3


def test_bfloat16_inputs_are_not_rounded():
    x, values = draw(0, 3, 64, dtype=jnp.bfloat16), draw(1, 8, 64, dtype=jnp.bfloat16)
    found = product(x, values, rounds_to="bfloat16")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, product(x, values))


def test_a_bfloat16_row_is_not_split():
    x, values = draw(0, 1, 64, dtype=jnp.bfloat16), draw(1, 8, 64, dtype=jnp.bfloat16)
    assert primitives(x, values)[1] == ()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_on_a_mesh_is_left_as_it_is(rows):
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        names, batch_axes = primitives(draw(0, rows, 64), draw(1, 8, 64))
    assert batch_axes == () and "optimization_barrier" not in names
