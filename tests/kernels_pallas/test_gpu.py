"""Every implementation and form of every spec against the reference, compiled on a GPU."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import grouped_product, masked_acceptance, ragged_attention, reference
from kernels_pallas.arg_specs import (
    ACCEPTANCE_SPECS,
    ATTENTION_SPECS,
    GROUPED_SPECS,
    acceptance_arguments,
    attention_arguments,
    grouped_arguments,
)
from kernels_pallas.graph_capture import compile_with_thunks, is_one_graph
from tests.kernels_pallas.closeness import assert_close
from tests.kernels_pallas.test_attention import with_nan_past_the_end
from tests.kernels_pallas.test_grouped import assert_products_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


def float32_products(spec):
    """Returns a context without TF32, which XLA multiplies float32 with by default."""
    return jax.default_matmul_precision("highest") if spec.dtype == "float32" else contextlib.nullcontext()


@pytest.mark.parametrize("form", ["pad", "split", "ragged"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
@pytest.mark.parametrize("spec", ATTENTION_SPECS, ids=lambda spec: spec.name)
def test_attention_equals_reference(spec, implementation, form):
    arguments = attention_arguments(spec)
    expected = reference.ragged_attention(**arguments, **spec.options)
    run = functools.partial(ragged_attention, **spec.options, implementation=implementation, form=form)
    try:
        with float32_products(spec):
            out = jax.jit(run)(**with_nan_past_the_end(arguments))
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert_close(out, expected)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
@pytest.mark.parametrize("spec", ACCEPTANCE_SPECS, ids=lambda spec: spec.name)
def test_acceptance_equals_reference(spec, implementation):
    arguments = acceptance_arguments(spec)
    expected = reference.masked_acceptance(**arguments)
    try:
        out = jax.jit(functools.partial(masked_acceptance, implementation=implementation))(**arguments)
    except NotImplementedError as error:
        pytest.skip(str(error))
    np.testing.assert_array_equal(out.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(out.next_token, expected.next_token)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("spec", GROUPED_SPECS, ids=lambda spec: spec.name)
def test_grouped_product_equals_reference(spec, implementation):
    arguments = grouped_arguments(spec)
    # The reference multiplies by all groups, which would have more results than memory holds.
    expected = jax.jit(by_rows)(**arguments)
    with float32_products(spec):
        found = jax.jit(functools.partial(grouped_product, implementation=implementation))(**arguments)
    # A GPU adds the terms in turn: the largest error of 81,920 sums of 768 was 4.7e-6 of the root of 768 on an H200.
    assert_products_close(found, expected, spec, float32_error=1e-5)


def by_rows(rows, weights, groups):
    """Returns the grouped product of one row after the other, in float32."""

    def multiply(operands):
        row, group = operands
        return (weights[group].astype(jnp.float32) * row.astype(jnp.float32)).sum(axis=1)

    return jax.lax.map(multiply, (rows, groups))


def test_grouped_rows_do_not_depend_on_others():
    """Bits and all, in one shape: the same row with other rows, in a group of another size."""
    spec = GROUPED_SPECS[2]
    arguments = grouped_arguments(spec)
    run, row = jax.jit(grouped_product), arguments["rows"][0]
    outs = []
    for size, factor in ((1, 1.0), (23, 100.0), (640, 0.01)):
        groups = jnp.where(jnp.arange(spec.num_rows) < size, 5, 9)
        rows = (factor * arguments["rows"]).at[size - 1].set(row)
        outs.append(np.asarray(run(rows, arguments["weights"], groups)[size - 1]))
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])


def test_both_ops_run_in_one_graph():
    spec, acceptance = ATTENTION_SPECS[3], ACCEPTANCE_SPECS[3]

    def step(attention_arguments, acceptance_arguments):
        return ragged_attention(**attention_arguments), masked_acceptance(**acceptance_arguments)

    operands = attention_arguments(spec), acceptance_arguments(acceptance)
    compiled, thunks = compile_with_thunks(jax.jit(step).lower(*operands))
    assert is_one_graph(thunks), thunks
    # The first runs record the graph, later ones replay it.
    tokens = [np.asarray(compiled(*operands)[1].next_token) for _ in range(4)]
    np.testing.assert_array_equal(tokens[3], tokens[0])
