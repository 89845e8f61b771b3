"""Our `argmax`, products and noise for CPUs are those of NumPy and jax, and a plan does not wait for a step."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.runtime import cpu_workarounds
from bass_jax.runtime.cpu_workarounds import argmax, matmul
from tests.marks import mostly_slow


def assert_is_argmax(scores):
    for found in (argmax(scores), jax.jit(argmax)(scores)):
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, np.argmax(np.asarray(scores, np.float32), axis=-1))


SIZES = (1, 7, 511, 512, 513, 1000, 49152)
QUICK = {("float32", 7), ("float32", 511), ("float32", 512), ("float32", 513), ("bfloat16", 513), ("float32", 49152)}
"""Sizes around the smallest that is searched in blocks, and that of a vocabulary."""


@pytest.mark.parametrize(
    "dtype, size", mostly_slow(itertools.product(("float32", "bfloat16"), SIZES), lambda case: case in QUICK)
)
def test_argmax_is_that_of_numpy_with_and_without_ties(size, dtype):
    rng = np.random.default_rng(size)
    assert_is_argmax(jnp.asarray(rng.normal(size=(2, 3, size)), dtype))
    # With four values, most rows have their maximum several times, within a block and in several blocks.
    assert_is_argmax(jnp.asarray(rng.integers(0, 4, (64, size)), dtype))


@pytest.mark.parametrize("size", [600, 640])
def test_infinities_and_nan(size):
    scores = np.random.default_rng(0).normal(size=(8, size)).astype(np.float32)
    scores[0] = -np.inf
    scores[1, :] = -np.inf
    scores[1, size - 1] = 3
    scores[2, 300] = np.inf
    scores[3], scores[3, 517] = -0.0, 0.0
    scores[4] = np.finfo(np.float32).min
    assert_is_argmax(jnp.asarray(scores))
    scores[5, [450, 451]] = np.nan
    scores[6] = np.nan
    scores[7, 200], scores[7, 400] = np.inf, np.nan
    found = jax.jit(argmax)(scores)
    assert (found >= 0).all() and (found < size).all()
    np.testing.assert_array_equal(found[:5], np.argmax(scores[:5], axis=-1))


@pytest.mark.parametrize("impl, is_partitionable", [("threefry2x32", True), ("threefry2x32", False), ("rbg", True)])
def test_noise_is_that_of_jax(impl, is_partitionable):
    with jax.threefry_partitionable(is_partitionable):
        keys = jax.random.split(jax.random.key(5, impl=impl), 3)
        expected = jax.jit(jax.vmap(lambda key: jax.random.gumbel(key, (1000,), jnp.float32)))(keys)
        program = jax.jit(cpu_workarounds.gumbel, static_argnums=1).lower(keys, 1000)
        np.testing.assert_array_equal(program.compile()(keys), expected)
    # In jax's form for CPUs, the rounds of Threefry are a loop.
    assert ("while" in program.as_text()) == (not is_partitionable)


def test_on_a_cpu_the_vocabulary_is_reduced_in_blocks():
    """The program must not contain an index reduction over the whole vocabulary, which is slow on CPUs."""
    program = jax.jit(argmax).lower(jax.ShapeDtypeStruct((5, 49152), jnp.float32)).as_text()
    assert "5x384xf32" in program
    assert "reduce" in program and "5x49152xi32" not in program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_instructions", [False, True])
def test_products_are_those_of_numpy(dtype, has_instructions, monkeypatch):
    """Of one row, of few and padded ones, and of too many for the workarounds."""
    monkeypatch.setattr(cpu_workarounds, "_has_instructions", lambda name: has_instructions)
    random = np.random.default_rng(0)
    matrix = jnp.asarray(random.normal(size=(36, 24)), dtype)
    for num_rows in (1, 2, 5, 7, 11, 65):
        rows = jnp.asarray(random.normal(size=(num_rows, 24)), dtype)
        expected = np.asarray(rows, np.float32) @ np.asarray(matrix, np.float32).T
        found = jax.jit(functools.partial(matmul, dtype=jnp.float32))(rows, matrix)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert jax.jit(matmul)(rows, matrix).dtype == dtype


def lowered_product(monkeypatch, has_avx512, dtype, num_rows) -> str:
    """Returns the product of rows and a matrix of 36 rows, as lowered for a CPU with or without AVX-512."""
    monkeypatch.setattr(cpu_workarounds, "_has_instructions", lambda name: has_avx512 and name == "avx512f")
    rows, matrix = (jax.ShapeDtypeStruct((num, 24), dtype) for num in (num_rows, 36))
    fresh = functools.partial(matmul)  # jax knows the traced `matmul` of other tests
    return jax.jit(fresh).lower(rows, matrix).as_text()


@pytest.mark.parametrize(
    "has_avx512, dtype, num_rows, is_exchanged",
    [
        (False, "float32", 64, True),
        (False, "float32", 65, False),
        (True, "float32", 8, True),
        (True, "float32", 9, False),
        (True, "bfloat16", 9, True),
    ],
)
def test_the_matrix_is_the_left_operand_of_a_product_with_few_rows(
    has_avx512, dtype, num_rows, is_exchanged, monkeypatch
):
    assert ("optimization_barrier" in lowered_product(monkeypatch, has_avx512, dtype, num_rows)) == is_exchanged


@pytest.mark.parametrize(
    "has_avx512, num_rows, num_computed", [(False, 5, 5), (False, 7, 8), (True, 7, 7), (False, 9, 9), (False, 12, 16)]
)
def test_rows_are_padded_where_the_padded_product_is_faster(has_avx512, num_rows, num_computed, monkeypatch):
    assert f"tensor<36x{num_computed}xf32>" in lowered_product(monkeypatch, has_avx512, "float32", num_rows)


BESIDE_A_FUNCTION_THAT_RUNS = """
import jax, jax.numpy as jnp, numpy as np
from bass_jax.runtime.cpu_workarounds import call_beside_steps

def run(x):
    return jax.lax.fori_loop(0, 3000, lambda _, y: y @ x, x)  # two seconds

matrix, number = jnp.eye(400), np.float32(1)
slow, quick = jax.jit(run).lower(matrix).compile(), jax.jit(lambda x: x + 1).lower(number).compile()
running = slow(matrix)
found = call_beside_steps(quick, number).block_until_ready()
assert not running.is_ready()
assert found == 2
running.block_until_ready()
"""


def test_a_call_beside_steps_does_not_wait_for_a_function_that_runs():
    """In another process, because the thread that runs the tests has a lower priority than those of XLA."""
    subprocess.run([sys.executable, "-c", BESIDE_A_FUNCTION_THAT_RUNS], check=True)
