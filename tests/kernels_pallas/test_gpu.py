"""Every implementation and form of every spec against the reference, compiled on a GPU."""

import functools

import jax
import numpy as np
import pytest

from kernels_pallas import masked_acceptance, ragged_attention, reference
from kernels_pallas.arg_specs import ACCEPTANCE_SPECS, ATTENTION_SPECS, acceptance_arguments, attention_arguments
from kernels_pallas.graph_capture import compile_with_thunks, is_one_graph
from tests.kernels_pallas.closeness import assert_close
from tests.kernels_pallas.test_attention import with_nan_past_the_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("form", ["pad", "split", "ragged"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
@pytest.mark.parametrize("spec", ATTENTION_SPECS, ids=lambda spec: spec.name)
def test_attention_equals_reference(spec, implementation, form):
    arguments = attention_arguments(spec)
    expected = reference.ragged_attention(**arguments, **spec.options)
    run = functools.partial(ragged_attention, **spec.options, implementation=implementation, form=form)
    try:
        with jax.default_matmul_precision("highest"):  # XLA's default for float32 on a GPU is TF32.
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
