"""Causal attention: its values and its gradient against a masked softmax that jax differentiates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention.causal import causal_attention
from tests.marks import mostly_slow

B, N, K, H = 2, 4, 2, 16


def masked_softmax(q, k, v, window, scale, soft_cap, chunk):
    """Computes all products and masks them."""
    group, tokens = N // K, q.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("btnh,bnsh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    place = np.arange(tokens)
    visible = place <= place[:, None]
    if window is not None:
        visible &= place > place[:, None] - window
    if chunk is not None:
        visible &= place // chunk == place[:, None] // chunk
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bnsh->btnh", weights, v)


def random_inputs(tokens, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, tokens, N, H), (B, K, tokens, H), (B, K, tokens, H), (B, tokens, N, H)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


# One block, several blocks, and lengths that are no multiple of a block: (tokens, window, scale, soft_cap, chunk).
CASES = [
    (1, None, None, None, None),
    (16, None, None, None, None),
    (64, None, 0.3, None, None),
    *((150, window, None, None, None) for window in (None, 1, 7, 60, 1000)),
    (97, None, 2.0, 3.0, None),
    (97, 20, 2.0, 3.0, None),
    *((150, None, None, None, chunk) for chunk in (1, 7, 60, 1000)),
    (97, 20, None, None, 30),
]
QUICK = (CASES[0], (97, 20, 2.0, 3.0, None), (97, 20, None, None, 30))


@pytest.mark.parametrize(
    ("tokens", "window", "scale", "soft_cap", "chunk"), mostly_slow(CASES, lambda case: case in QUICK)
)
def test_values_and_gradients(tokens, window, scale, soft_cap, chunk):
    *inputs, given = random_inputs(tokens)

    def of(attend):
        def loss(q, k, v):
            out = attend(q, k, v)
            return (out * given).sum(), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)

    (_, expected), expected_gradients = of(lambda q, k, v: masked_softmax(q, k, v, window, scale, soft_cap, chunk))
    options = {"window": window, "scale": scale, "soft_cap": soft_cap, "chunk": chunk}
    (_, found), gradients = of(lambda q, k, v: causal_attention(q, k, v, **options))
    np.testing.assert_allclose(found, expected, atol=3e-6)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, expected, atol=3e-5)


@pytest.mark.slow
def test_16_bit_inputs_add_only_rounding():
    *inputs, given = random_inputs(150, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in inputs]

    def gradient(*arguments):
        return jax.grad(
            lambda *x: (causal_attention(*x).astype(jnp.float32) * given.astype(jnp.float32)).sum(), argnums=(0, 1, 2)
        )(*arguments)

    assert causal_attention(*inputs).dtype == jnp.bfloat16
    np.testing.assert_allclose(causal_attention(*inputs).astype(jnp.float32), causal_attention(*wide), atol=0.03)
    for found, expected in zip(gradient(*inputs), gradient(*wide), strict=True):
        assert found.dtype == jnp.bfloat16
        error = np.linalg.norm(found.astype(jnp.float32) - expected) / np.linalg.norm(expected)
        assert error < 0.01


def test_padding_after_a_sequence_has_no_effect():
    """It changes neither the output nor the gradient of the tokens before it."""
    *inputs, given = random_inputs(150)
    length = 70

    @jax.jit
    def of(q, k, v):
        return causal_attention(q, k, v)[:, :length], jax.grad(
            lambda *x: (causal_attention(*x) * given)[:, :length].sum(), argnums=(0, 1, 2)
        )(q, k, v)

    out, gradients = of(*inputs)
    short = [inputs[0][:, :length], *(x[:, :, :length] for x in inputs[1:])]
    np.testing.assert_allclose(out, jax.jit(causal_attention)(*short), atol=2e-6)
    other = [inputs[0].at[:, length:].mul(3.0), *(x.at[:, :, length:].mul(-2.0) for x in inputs[1:])]
    changed, other_gradients = of(*other)
    np.testing.assert_array_equal(changed, out)
    for found, expected in zip(other_gradients, gradients, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
