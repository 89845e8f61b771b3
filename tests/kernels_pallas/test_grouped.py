"""Grouped products against the reference, in interpreters, and compiled for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import grouped_product, reference
from kernels_pallas.arg_specs import GROUPED_SPECS, GroupedSpec, grouped_arguments
from kernels_pallas.grouped.blocks import blocks_of_groups
from kernels_pallas.grouped.triton import MAX_COMPARED_ROWS, blocks_by_comparison
from kernels_pallas.tuning import grouped_tiles
from tests.gpu_compile import compile_for, lower_for, needs_gpu_compiler
from tests.marks import mostly_slow

SMALL = GroupedSpec("small", 40, 6, 48, 96, "float32")
SIZES = {
    "ragged": [17, 0, 1, 0, 20, 2],
    "one group": [0, 0, 0, 40, 0, 0],
    "first and last": [16, 0, 0, 0, 0, 24],
    "no rows": [0, 0, 0, 0, 0, 0],
    "rows of no group": [0, 3, 18, 0, 0, 1],
}
SPEC_BY_NAME = {spec.name: spec for spec in GROUPED_SPECS}
run = jax.jit(functools.partial(grouped_product, interpret=True), static_argnames="implementation")
make_blocks = jax.jit(blocks_of_groups, static_argnums=(1, 2))
compare_blocks = jax.jit(functools.partial(blocks_by_comparison, interpret=True), static_argnums=(1, 2))


def groups_of(sizes, num_rows):
    """Returns groups of these sizes in random order; the other rows have no group."""
    groups = np.repeat(np.arange(len(sizes) + 1), [*sizes, num_rows - sum(sizes)])
    groups = np.random.default_rng(0).permutation(groups)
    return jnp.asarray(np.where(groups == len(sizes), -1, groups), jnp.int32)


def assert_products_close(found, expected, spec, float32_error=3e-6):
    """The terms are products of numbers near 1, so a sum of D of them is about the root of D.

    Tensor cores truncate sums of 16-bit products in float32; rounding to 16 bits would have errors of 2e-3.
    """
    assert found.dtype == jnp.float32
    error = float32_error if spec.dtype == "float32" else 1e-4
    np.testing.assert_allclose(found, expected, rtol=0, atol=error * np.sqrt(spec.depth))


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize(
    "dtype", mostly_slow(["float32", "bfloat16", "float16", "int8"], lambda dtype: dtype in ("bfloat16", "int8"))
)
def test_equals_reference(implementation, dtype):
    spec = GroupedSpec("small", 40, 6, 48, 96, "bfloat16" if dtype == "int8" else dtype, dtype == "int8")
    arguments = grouped_arguments(spec)
    for sizes in SIZES.values():
        arguments["groups"] = groups_of(sizes, 40)
        expected = np.asarray(jax.jit(reference.grouped_product)(**arguments))
        assert_products_close(run(**arguments, implementation=implementation), expected, spec)


def test_equals_a_loop():
    arguments = grouped_arguments(SMALL)
    rows, weights, groups = (np.asarray(arguments[name]) for name in ("rows", "weights", "groups"))
    expected = np.stack([weights[group] @ row for group, row in zip(groups, rows, strict=True)])
    assert_products_close(jax.jit(reference.grouped_product)(**arguments), expected, SMALL)
    assert_products_close(run(**arguments, implementation="triton"), expected, SMALL)


@pytest.mark.parametrize("sizes", [[300, 0, 5], [65, 120, 120], [305, 0, 0], [0, 64, 128]])
def test_groups_of_several_blocks(sizes):
    """Blocks are as high as they get."""
    spec = GroupedSpec("many rows", 305, 3, 32, 64, "bfloat16")
    arguments = grouped_arguments(spec) | {"groups": groups_of(sizes, 305)}
    expected = np.asarray(jax.jit(reference.grouped_product)(**arguments))
    assert_products_close(run(**arguments, implementation="triton"), expected, spec)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_a_row_may_have_several_groups(implementation):
    arguments = grouped_arguments(SMALL)
    rows = arguments["rows"][:8]
    expected = run(**arguments | {"rows": jnp.repeat(rows, 5, axis=0)}, implementation=implementation)
    found = run(**arguments | {"rows": rows}, implementation=implementation)
    np.testing.assert_array_equal(found, expected)
    assert_products_close(jax.jit(reference.grouped_product)(**arguments | {"rows": rows}), expected, SMALL)


def test_other_rows_do_not_change_a_row():
    arguments = grouped_arguments(SMALL) | {"groups": groups_of([17, 0, 1, 0, 20, 2], 40)}
    expected = run(**arguments, implementation="triton")
    others = jnp.where(jnp.arange(40)[:, None] == 20, arguments["rows"], 1e30 * arguments["rows"])
    found = run(**arguments | {"rows": others.at[3].set(jnp.nan)}, implementation="triton")
    np.testing.assert_array_equal(found[20], expected[20])
    assert np.isnan(found[3]).all() and np.isfinite(found[4:]).all()


def test_gradients_are_those_of_xla():
    arguments = grouped_arguments(SMALL) | {"groups": groups_of([17, 0, 1, 0, 20, 0], 40)}
    groups = arguments["groups"]

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, rows, weights):
        def loss(rows, weights):
            return jnp.sin(grouped_product(rows, weights, groups, implementation=implementation, interpret=True)).sum()

        return jax.grad(loss, argnums=(0, 1))(rows, weights)

    found, expected = (gradients(name, arguments["rows"], arguments["weights"]) for name in ("triton", "xla"))
    for part, expected_part in zip(found, expected, strict=True):
        np.testing.assert_allclose(part, expected_part, atol=1e-4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": jnp.zeros((4, 3, 2))}, r"rows has shape \(4, 3, 2\)"),
        ({"rows": jnp.zeros((40, 96), jnp.int32)}, "int32; expected floats"),
        ({"weights": jnp.zeros((6, 48, 95))}, r"expected \[G, C, 96\]"),
        ({"groups": jnp.zeros(45, jnp.int32)}, r"groups has shape \(45,\), int32; expected integers, a multiple of 40"),
        ({"groups": jnp.zeros(40)}, "float32; expected integers"),
        ({"implementation": "mosaic_gpu"}, "implementation is 'mosaic_gpu'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        grouped_product(**grouped_arguments(SMALL) | changes)


def test_sides_that_16_does_not_divide_use_xla():
    spec = GroupedSpec("odd", 5, 2, 8, 20, "float32")
    arguments = grouped_arguments(spec)
    with pytest.raises(NotImplementedError, match=r"sides 16 divides, not \(8, 20\)"):
        run(**arguments, implementation="triton")
    assert_products_close(run(**arguments), reference.grouped_product(**arguments), spec)


@pytest.mark.parametrize(("num_rows", "num_groups", "block_m"), [(1, 1, 16), (130, 7, 16), (64, 200, 32), (300, 3, 64)])
def test_the_maps_to_blocks_are_equal(num_rows, num_groups, block_m):
    groups = jnp.asarray(np.random.default_rng(num_rows).integers(num_groups, size=num_rows), jnp.int32)
    expected = jax.tree.map(np.asarray, make_blocks(groups, num_groups, block_m))
    found = jax.tree.map(np.asarray, compare_blocks(groups, num_groups, block_m))
    np.testing.assert_array_equal(found.sizes, expected.sizes)
    is_block = found.sizes > 0
    np.testing.assert_array_equal(found.groups[is_block], expected.groups[is_block])
    is_row = (np.arange(block_m) < found.sizes[:, None]).reshape(-1)
    np.testing.assert_array_equal(found.rows[is_row], expected.rows[is_row])
    assert sorted(found.rows[is_row]) == [*range(num_rows)]


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 80, 172, 256, 320])
def test_matrices_are_read_about_once(num_tokens):
    """By the map of blocks: XLA's estimate counts all matrices, whatever the kernel reads."""
    spec = GroupedSpec("tokens", 8 * num_tokens, 128, 1536, 2048)
    rng = np.random.default_rng(num_tokens)
    chosen = np.concatenate([rng.choice(128, 8, replace=False) for _ in range(num_tokens)])
    tiles = grouped_tiles(8 * num_tokens, spec.shapes()["weights"].shape, spec.dtype)
    blocks = jax.tree.map(np.asarray, make_blocks(jnp.asarray(chosen, jnp.int32), 128, tiles.block_m))
    is_block = blocks.sizes > 0
    rows = blocks.rows.reshape(-1, tiles.block_m)[np.arange(tiles.block_m) < blocks.sizes[:, None]]
    assert sorted(rows) == [*range(8 * num_tokens)]
    np.testing.assert_array_equal(chosen[rows], np.repeat(blocks.groups, blocks.sizes))
    assert is_block.sum() <= 1.2 * len(np.unique(chosen))


@pytest.mark.parametrize("name", SPEC_BY_NAME)
def test_default_lowers_to_the_kernel(name):
    text = lower_for(lambda arguments: grouped_product(**arguments), SPEC_BY_NAME[name].shapes()).as_text()
    is_sorted = SPEC_BY_NAME[name].num_rows > MAX_COMPARED_ROWS  # by XLA; else a kernel makes the map
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2 - is_sorted


QUICK = (("qwen3_30b_gate_up", "H200"),)


@needs_gpu_compiler
@pytest.mark.parametrize(
    "name, device",
    mostly_slow([(name, device) for device in ("H200", "A100") for name in SPEC_BY_NAME], lambda case: case in QUICK),
)
def test_weights_are_not_copied(name, device):
    """Spills are errors, and the temporaries are the map of blocks only."""
    compiled = compile_for(lambda arguments: grouped_product(**arguments), SPEC_BY_NAME[name].shapes(), device=device)
    assert compiled.memory_analysis().temp_size_in_bytes < (1 << 16) + 8 * SPEC_BY_NAME[name].num_rows
