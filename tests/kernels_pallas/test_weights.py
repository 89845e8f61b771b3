"""Softmax weights as two 16-bit terms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import ragged_attention, reference
from kernels_pallas.arg_specs import AttentionSpec, attention_arguments
from kernels_pallas.attention.weights import weight_terms
from kernels_pallas.ops import MAX_KERNEL_TOKENS
from tests.kernels_pallas.closeness import assert_close
from tests.marks import mostly_slow


# The absolute bound is half of the smallest float16 for each term.
@pytest.mark.parametrize("dtype, relative, absolute", [("bfloat16", 2.0**-16, 0.0), ("float16", 2.0**-21, 2.0**-25)])
def test_two_terms_have_the_bits_of_both(dtype, relative, absolute):
    """Compiled, because XLA may remove a conversion to 16 bits and back."""
    weights = jnp.geomspace(1e-12, 1.0, 10_000)
    terms = jax.jit(weight_terms, static_argnums=1)(weights, jnp.dtype(dtype))
    assert [term.dtype for term in terms] == [dtype, dtype]
    total = sum(np.asarray(term.astype(jnp.float32), np.float64) for term in terms)
    exact = np.asarray(weights, np.float64)
    assert (np.abs(total - exact) <= relative * exact + 2 * absolute).all()


def test_float32_is_its_own_term():
    weights = jnp.array([0.1, 1.0, 0.0])
    (term,) = weight_terms(weights, jnp.dtype("float32"))
    assert term is weights


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float16"], lambda dtype: dtype == "bfloat16"))
def test_prefill_rounds_its_weights(dtype):
    """XLA uses one term of each weight in passes longer than the kernels support, and exceeds two units of error."""
    spec = AttentionSpec("chunk", 3, MAX_KERNEL_TOKENS + 1, 8, 2, 64, 160, dtype)
    arguments = attention_arguments(spec)
    expected = reference.ragged_attention(**arguments)
    out = ragged_attention(**arguments, implementation="xla")
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2 * eps, rtol=eps)
    with pytest.raises(AssertionError, match="are within"):
        assert_close(out, expected)
