"""Masked acceptance in the Mosaic GPU dialect, in its interpreter; the kernel bodies are those of Triton."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import KernelSampling, masked_acceptance, reference
from kernels_pallas.acceptance.mosaic_gpu import masked_acceptance_mosaic_gpu
from kernels_pallas.acceptance.types import AcceptanceInputs
from kernels_pallas.arg_specs import ACCEPTANCE_SPECS, AcceptanceSpec, acceptance_arguments
from kernels_pallas.tuning import AcceptanceTiles
from tests.kernels_pallas.test_acceptance import assert_same, expect, plain_sampling
from tests.marks import mostly_slow

SPEC_BY_NAME = {spec.name: spec for spec in ACCEPTANCE_SPECS}
SMALL = AcceptanceSpec("small", 4, 2, 200)
make_arguments = functools.cache(acceptance_arguments)


@jax.jit
def run(arguments):
    return masked_acceptance(**arguments, implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["smollm2_135m", "llama3_8b_decode", "qwen3_8b_ngram", "gpt2_f16"], lambda name: name == "qwen3_8b_ngram"
    ),
)
def test_equals_reference_token_for_token(name):
    """All sampling parameters and dtypes, and several blocks, of which the last overlaps the one before."""
    arguments = make_arguments(dataclasses.replace(SPEC_BY_NAME[name].reduced(), vocab_size=1000))
    assert_same(run(arguments), expect(arguments))


@pytest.mark.slow
def test_blocks_of_a_vocabulary_merge():
    arguments = make_arguments(SMALL)
    out = masked_acceptance_mosaic_gpu(
        AcceptanceInputs(**arguments), tiles=AcceptanceTiles(128, 128, 4), interpret=True
    )
    assert_same(out, expect(arguments))


@pytest.mark.slow
@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31 - 1), data=st.data())
def test_any_sampling_parameters(seed, data):
    arguments = make_arguments(SMALL, seed=seed % 3)
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), 8))
    arguments = arguments | {"accept_keys": keys[:4], "residual_keys": keys[4:]}

    def rows(values, dtype):
        return jnp.asarray(data.draw(st.lists(values, min_size=4, max_size=4)), dtype)

    arguments["num_drafted"] = rows(st.integers(0, 2), jnp.int32)
    arguments["sampling"] = KernelSampling(
        rows(st.sampled_from([0.0, 0.3, 1.0, 2.0]), jnp.float32),
        rows(st.integers(0, 203), jnp.int32),
        rows(st.sampled_from([0.013, 0.21, 0.77, 1.0]), jnp.float32),
        rows(st.sampled_from([0.0, 0.031, 0.4, 1.0]), jnp.float32),
    )
    assert_same(run(arguments), expect(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_logits_invalidate_their_row_only(temperature):
    """Greedy rows do not read the draft distribution."""
    arguments = make_arguments(SMALL) | {"sampling": plain_sampling(4, temperature=temperature)}
    mode = jnp.argmax(arguments["target_logits"], axis=-1).astype(jnp.int32)
    arguments |= {"draft_tokens": mode[:, :2], "num_drafted": jnp.full((4,), 2, jnp.int32)}
    arguments["draft_probs"] = jnp.full_like(arguments["draft_probs"], 1e-9 if temperature else jnp.nan)
    logits = arguments["target_logits"].at[0, 0, 5].set(jnp.nan).at[1, 2, 199].set(jnp.inf)
    out = run(arguments | {"target_logits": logits})
    np.testing.assert_array_equal(out.num_accepted, [0, 2, 2, 2])
    np.testing.assert_array_equal(out.is_valid, [False, False, True, True])
    assert not out.next_token[:2].any() and np.isfinite(out.logprobs).all()
    expected = run(arguments)
    assert_same(jax.tree.map(lambda x: x[2:], out), jax.tree.map(lambda x: x[2:], expected))


@pytest.mark.slow
def test_runs_in_a_while_loop():
    arguments = make_arguments(SMALL)

    @jax.jit
    def loop(arguments):
        def body(carry):
            step, total = carry
            changed = arguments | {"residual_keys": arguments["residual_keys"] + step}
            out = masked_acceptance(**changed, implementation="mosaic_gpu", interpret=True)
            return step + jnp.uint32(1), total + out.next_token

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.uint32(0), jnp.zeros((4,), jnp.int32)))[1]

    expected = sum(
        reference.masked_acceptance(**arguments | {"residual_keys": arguments["residual_keys"] + step}).next_token
        for step in np.arange(3, dtype=np.uint32)
    )
    np.testing.assert_array_equal(loop(arguments), expected)


@pytest.mark.parametrize("vocab_size, message", [(64, "at least 128"), (1003, "whole 16 bytes")])
def test_refuses_what_it_does_not_support(vocab_size, message):
    spec = dataclasses.replace(SMALL, vocab_size=vocab_size)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(run, spec.shapes())
