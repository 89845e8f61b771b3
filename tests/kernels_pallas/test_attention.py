"""Numbers of ragged attention: every implementation, form and spec against the reference, interpreted."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import quantize_kv, ragged_attention, reference
from kernels_pallas.arg_specs import ATTENTION_SPECS, AttentionSpec, attention_arguments
from kernels_pallas.attention.mosaic_gpu import ragged_attention_mosaic_gpu
from kernels_pallas.attention.packing import gather_pages
from kernels_pallas.attention.triton import ragged_attention_triton
from kernels_pallas.tuning import AttentionTiles
from tests.kernels_pallas.closeness import assert_close

SPEC_BY_NAME = {spec.name: spec for spec in ATTENTION_SPECS}
# One of each kind of float: the other forms differ from `ragged` only in where a walk ends.
FORM_SPECS = ("smollm2_135m", "phi2_f32", "llama3_8b_int8", "mistral_7b")
# A cache position past a row's end can hold any bits.
POISON = {"k_cache": jnp.nan, "v_cache": jnp.nan, "k_scale": jnp.nan, "v_scale": jnp.nan}


def poisoned(arguments):
    """The arguments with NaN (127 in an INT8 cache) at every position past each row's last real query."""
    total = arguments["lengths"] + arguments["num_queries"]
    result = dict(arguments)
    if "tables" in arguments:
        tables, (num_pages, _, page_size, _) = arguments["tables"], arguments["k_cache"].shape
        is_past = jnp.arange(tables.shape[1] * page_size) >= total[:, None]
        is_past = jnp.zeros((num_pages, page_size), bool).at[tables].set(is_past.reshape(*tables.shape, page_size))
        for name in ("k_cache", "v_cache"):
            result[name] = jnp.where(is_past[:, None, :, None], jnp.nan, arguments[name])
        return result
    for name in POISON.keys() & arguments.keys():
        values = arguments[name]
        is_past = jnp.arange(values.shape[2]) >= total[:, None, None]
        poison = 127 if values.dtype == jnp.int8 else jnp.nan
        result[name] = jnp.where(is_past.reshape(is_past.shape + (1,) * (values.ndim - 3)), poison, values)
    return result


def check(spec: AttentionSpec, **options):
    arguments = attention_arguments(spec)
    expected = reference.ragged_attention(**arguments, **spec.options)

    @jax.jit
    def run(arguments):
        return ragged_attention(**arguments, **spec.options, **options)

    out = run(poisoned(arguments))
    assert out.dtype == arguments["q"].dtype
    assert_close(out, expected)


@pytest.mark.parametrize("name", SPEC_BY_NAME)
def test_triton_equals_reference(name):
    check(SPEC_BY_NAME[name].reduced(), implementation="triton", interpret=True)


# Every head size, both 16-bit floats, INT8, a window, a cap, several tiles: wgmma takes no float32.
MOSAIC_SPECS = (
    "smollm2_135m", "phi2", "phi3_mini", "llama3_8b_f16", "llama3_8b_int8", "mistral_7b", "gemma2_2b",
    "llama3_8b_long_draft", "llama3_8b_paged",
)  # fmt: skip


def blocks_of_64(spec):
    """The reduced spec with a capacity that the Mosaic GPU kernel takes, and few rows: its interpreter is slow."""
    return dataclasses.replace(spec.reduced(), batch=3, capacity=192)


@pytest.mark.parametrize("name", MOSAIC_SPECS)
def test_mosaic_gpu_equals_reference(name):
    check(blocks_of_64(SPEC_BY_NAME[name]), implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize("form, num_splits", [("pad", 2), ("split", 1), ("ragged", 2)])
def test_mosaic_gpu_forms_equal_reference(form, num_splits):
    spec = blocks_of_64(SPEC_BY_NAME["mistral_7b"])
    arguments = attention_arguments(spec)
    out = ragged_attention_mosaic_gpu(
        **poisoned(arguments),
        form=form,
        **spec.options,
        scale=spec.head_dim**-0.5,
        tiles=AttentionTiles(64, 64, num_splits, 4, 2),
        interpret=True,
    )
    assert_close(out, reference.ragged_attention(**arguments, **spec.options))


def test_mosaic_gpu_caps_scores():
    spec = dataclasses.replace(blocks_of_64(SPEC_BY_NAME["smollm2_135m"]), soft_cap=1.5)
    check(spec, implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("smollm2_135m_f32", {}, "bfloat16 or float16, not float32"),
        ("smollm2_135m", {"head_dim": 72}, "head size that 16 divides"),
        ("smollm2_135m", {"head_dim": 192}, "that 128 divides, not 192"),
        ("smollm2_135m", {"capacity": 100}, "capacity that 64 divides, not 100"),
    ],
)
def test_mosaic_gpu_leaves_the_rest_to_triton(name, changes, message):
    spec = dataclasses.replace(blocks_of_64(SPEC_BY_NAME[name]), **changes)
    with pytest.raises(NotImplementedError, match=message):
        check(spec, implementation="mosaic_gpu", interpret=True)


@pytest.mark.parametrize("form", ["pad", "split"])
@pytest.mark.parametrize("name", FORM_SPECS)
def test_triton_forms_equal_reference(name, form):
    check(SPEC_BY_NAME[name].reduced(), implementation="triton", form=form, interpret=True)


@pytest.mark.parametrize("form", ["pad", "split", "ragged"])
@pytest.mark.parametrize("name, num_splits, block_m", [("phi2_f32", 2, 16), ("mistral_7b", 5, 64)])
def test_splits_of_a_walk_merge(name, form, num_splits, block_m):
    """Several programs share a row, some of them with nothing to walk; several tiles share a kv head."""
    spec = SPEC_BY_NAME[name].reduced()
    arguments = attention_arguments(spec)
    expected = reference.ragged_attention(**arguments, **spec.options)
    out = ragged_attention_triton(
        **poisoned(arguments),
        form=form,
        **spec.options,
        scale=spec.head_dim**-0.5,
        tiles=AttentionTiles(block_m, 16, num_splits, 4, 2),
        interpret=True,
    )
    assert_close(out, expected)


@pytest.mark.parametrize("name", SPEC_BY_NAME)
def test_xla_equals_reference(name):
    check(SPEC_BY_NAME[name].reduced(), implementation="xla")


@pytest.mark.parametrize("name", ["smollm2_135m_f32", "qwen2_7b"])
def test_cudnn_merge_equals_reference(name):
    """With XLA in cuDNN's place, which this machine lacks: rows with no prefix and rows with few queries included."""
    spec = SPEC_BY_NAME[name].reduced()
    arguments = attention_arguments(spec)
    out = ragged_attention(**arguments, implementation="cudnn", interpret=True, is_cache_finite=True)
    expected = reference.ragged_attention(**arguments)
    # The two parts are rounded before they are merged.
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=1e-5 if out.dtype == jnp.float32 else 0.03)


@pytest.mark.parametrize(
    "name, changes",
    [("smollm2_135m_f32", {}), ("mistral_7b", {}), ("llama3_8b_int8", {}), ("qwen2_7b", {"soft_cap": 9.0})],
)
def test_cudnn_says_what_it_cannot(name, changes):
    spec = dataclasses.replace(SPEC_BY_NAME[name].reduced(), **changes)
    with pytest.raises(NotImplementedError, match="cuDNN"):
        ragged_attention(**attention_arguments(spec), **spec.options, implementation="cudnn", is_cache_finite=True)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_pages_hold_what_a_dense_cache_holds(implementation):
    """To the last bit, wherever the pages lie; and entries past a row's end may point anywhere."""
    spec = dataclasses.replace(SPEC_BY_NAME["smollm2_135m_f32_paged"].reduced(), page_size=32)
    arguments = attention_arguments(spec)
    dense = {name: gather_pages(arguments[name], arguments["tables"]) for name in ("k_cache", "v_cache")}
    others = {name: arguments[name] for name in ("q", "lengths", "num_queries")}
    num_used = -(-(arguments["lengths"] + arguments["num_queries"]) // 32)
    is_used = jnp.arange(spec.capacity // 32) < num_used[:, None]
    tables = jnp.where(is_used, arguments["tables"], 10**6)
    options = {"implementation": implementation, "interpret": True}
    expected = ragged_attention(**others, **dense, **options)
    found = ragged_attention(**arguments | {"tables": tables}, **options)
    np.testing.assert_array_equal(found, expected)


def test_pages_of_int8():
    """By XLA alone: the kernels leave them to it."""
    spec = AttentionSpec("int8", 2, 3, 4, 2, 16, 48, "float32", is_quantized=True)
    arguments = attention_arguments(spec)
    expected = reference.ragged_attention(**arguments)
    tables = jnp.array([[4, 1, 3], [0, 5, 2]], jnp.int32)
    paged = {}
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        values = jnp.moveaxis(arguments[name].reshape(2, 2, 3, 16, *arguments[name].shape[3:]), 1, 2)
        paged[name] = jnp.zeros((6, *values.shape[2:]), values.dtype).at[tables].set(values)
    arguments |= paged | {"tables": tables}
    assert_close(ragged_attention(**arguments), expected)
    assert_close(reference.ragged_attention(**arguments), expected)
    with pytest.raises(NotImplementedError, match="INT8"):
        ragged_attention(**arguments, implementation="triton", interpret=True)


def test_pages_smaller_than_a_block_are_left_to_the_next():
    spec = dataclasses.replace(SPEC_BY_NAME["llama3_8b_paged"].reduced(), page_size=24, capacity=96)
    arguments = attention_arguments(spec)
    options = {"form": "ragged", "window": None, "scale": 1.0, "tiles": AttentionTiles(16, 16, 1, 4, 2)}
    with pytest.raises(NotImplementedError, match="pages that its block of 16 divides, not of 24"):
        ragged_attention_triton(**arguments, **options, interpret=True)
    check(spec)


@pytest.mark.parametrize("num_tokens", [64, 256])
def test_prefill_chunk_falls_through_to_xla(num_tokens):
    spec = AttentionSpec("prefill", 2, num_tokens, 4, 2, 32, 300, "float32")
    check(spec)
    with pytest.raises(NotImplementedError, match="query tokens"):
        check(spec, implementation="triton", interpret=True)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("lengths", [[-3, 10**6, 4, 0], [2**31 - 1, -(2**31), 4, 0]])
def test_garbage_rows_leave_their_neighbours_alone(implementation, lengths):
    spec = AttentionSpec("garbage", 4, 3, 4, 2, 32, 48, "float32")
    arguments = attention_arguments(spec, lengths=np.array([0, 0, 4, 0], np.int32))
    arguments["num_queries"] = jnp.array([3, 3, 3, 2], jnp.int32)
    expected = reference.ragged_attention(**arguments)
    arguments = poisoned(arguments) | {"lengths": jnp.asarray(lengths, jnp.int32)}
    out = ragged_attention(**arguments, implementation=implementation, interpret=True)
    assert_close(out[2:], expected[2:])


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_row_near_its_capacity_uses_fewer_queries(implementation):
    """A row with room for 2 of the 5 tokens: the others' positions lie outside its cache."""
    spec = AttentionSpec("full", 1, 5, 4, 2, 32, 48, "float32")
    arguments = attention_arguments(spec, lengths=np.array([46], np.int32))
    arguments["num_queries"] = jnp.array([2], jnp.int32)
    out = ragged_attention(**arguments, implementation=implementation, interpret=True)
    assert_close(out, reference.ragged_attention(**arguments))
    assert not out[:, 2:].any()


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu", "xla"])
def test_rows_without_queries_are_zero_whatever_their_cache_holds(implementation):
    """Their prefix counts as written, and XLA multiplied its NaN by weights of zero."""
    spec = AttentionSpec("none", 3, 3, 4, 2, 64, 128, "float16")
    arguments = attention_arguments(spec, lengths=np.array([20, 9, 9], np.int32))
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].at[:2].set(jnp.nan)
    arguments["lengths"] = jnp.array([20, 10**6, 9], jnp.int32)
    arguments["num_queries"] = jnp.array([0, 0, 3], jnp.int32)
    out = ragged_attention(**arguments, implementation=implementation, interpret=True)
    assert not out[:2].any()
    assert out[2].any()
    assert jnp.isfinite(out).all()


# Few shapes, so that few programs are compiled; lengths and counts, drawn freely, are traced.
DRAWN_SPECS = (
    AttentionSpec("multi_head", 3, 1, 3, 3, 16, 70, "float32", None, True),
    AttentionSpec("groups_of_7", 3, 7, 14, 2, 48, 133, "float32", 9, soft_cap=1.5),
    AttentionSpec("one_kv_head", 3, 33, 12, 1, 64, 90, "float32"),
)


@functools.partial(jax.jit, static_argnames=("window", "soft_cap", "form", "implementation"))
def run(arguments, **options):
    return ragged_attention(**arguments, **options, interpret=True)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(spec=st.sampled_from(DRAWN_SPECS), form=st.sampled_from(["pad", "split", "ragged"]), data=st.data())
def test_any_length_and_count(spec, form, data):
    lengths = data.draw(st.lists(st.integers(0, spec.capacity - spec.num_tokens), min_size=3, max_size=3))
    counts = data.draw(st.lists(st.integers(0, spec.num_tokens), min_size=3, max_size=3))
    arguments = attention_arguments(spec, lengths=np.array(lengths, np.int32))
    arguments["num_queries"] = jnp.array(counts, jnp.int32)
    expected = reference.ragged_attention(**arguments, **spec.options)
    for implementation in ("triton", "xla"):
        out = run(poisoned(arguments), **spec.options, form=form, implementation=implementation)
        assert_close(out, expected)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_equals_a_numpy_loop(implementation):
    """The reference against an independent loop in numpy, so that they cannot share a mistake."""
    spec = AttentionSpec("tiny", 2, 3, 4, 2, 16, 20, "float32", window=4, soft_cap=0.7)
    arguments = attention_arguments(spec)
    q, k, v, lengths, num_queries = (np.asarray(arguments[n]) for n in spec.shapes())
    expected = np.zeros_like(q)
    for b in range(2):
        for t in range(num_queries[b]):
            last = lengths[b] + t
            seen = slice(max(0, last - 3), last + 1)
            for n in range(4):
                scores = 0.7 * np.tanh(k[b, n // 2, seen] @ q[b, t, n] / 4.0 / 0.7)
                weights = np.exp(scores - scores.max())
                expected[b, t, n] = weights @ v[b, n // 2, seen] / weights.sum()
    np.testing.assert_allclose(reference.ragged_attention(**arguments, **spec.options), expected, atol=1e-6)
    out = ragged_attention(**arguments, **spec.options, implementation=implementation, interpret=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
def test_runs_under_jit_in_a_while_loop(implementation):
    dtype = "bfloat16" if implementation == "mosaic_gpu" else "float32"
    spec = AttentionSpec("loop", 2, 2, 4, 2, 64, 64, dtype)
    arguments = attention_arguments(spec, lengths=np.array([0, 5], np.int32))
    del arguments["num_queries"]

    @jax.jit
    def run(arguments):
        def body(carry):
            step, lengths, outs = carry
            out = ragged_attention(**arguments | {"lengths": lengths}, implementation=implementation, interpret=True)
            return step + 1, lengths + 2, outs.at[step].set(out)

        start = (0, arguments["lengths"], jnp.zeros((3, *arguments["q"].shape), dtype))
        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, start)[2]

    expected = [
        reference.ragged_attention(**arguments | {"lengths": arguments["lengths"] + 2 * step}) for step in range(3)
    ]
    assert_close(run(arguments), jnp.stack(expected))


def test_quantize_kv_rounds_to_half_a_step():
    values = jax.random.normal(jax.random.key(0), (2, 3, 5, 16)).at[0, 0, 0].set(0.0)
    quantized, scale = quantize_kv(values)
    assert quantized.dtype == jnp.int8 and scale.shape == (2, 3, 5)
    error = jnp.abs(quantized * scale[..., None] - values)
    assert (error <= scale[..., None] * 0.5001).all()
    assert not quantized[0, 0, 0].any()


def arguments_of(**changes):
    spec = AttentionSpec("errors", 2, 3, 4, 2, 16, 20, "float32")
    return attention_arguments(spec) | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": jnp.zeros((2, 3, 4))}, r"q has shape .* expected \[B, T, N, H\]"),
        ({"q": jnp.zeros((2, 3, 5, 16))}, "q has 5 heads; expected a multiple of k_cache's 2"),
        ({"q": jnp.zeros((2, 21, 4, 16))}, "21 new tokens"),
        ({"q": jnp.zeros((2, 3, 4, 16), jnp.int32)}, "q has dtype int32"),
        ({"k_cache": jnp.zeros((2, 2, 20, 8))}, "k_cache has shape"),
        ({"v_cache": jnp.zeros((2, 2, 19, 16))}, "v_cache has shape"),
        (
            {"k_cache": jnp.zeros((2, 2, 20, 16), jnp.int8), "v_cache": jnp.zeros((2, 2, 20, 16), jnp.int8)},
            "int8",
        ),
        ({"k_scale": jnp.zeros((2, 2, 20))}, "go together"),
        ({"lengths": jnp.zeros((3,), jnp.int32)}, "lengths has shape"),
        ({"lengths": jnp.zeros((2,))}, "lengths has dtype float32"),
        ({"num_queries": jnp.zeros((2, 1), jnp.int32)}, "num_queries has shape"),
        ({"form": "dense"}, "form is 'dense'"),
        ({"tables": jnp.zeros((3, 4), jnp.int32)}, r"tables has shape \(3, 4\)"),
        ({"tables": jnp.zeros((2, 4))}, "float32; expected integers"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; expected a positive number"),
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ragged_attention(**arguments_of(**changes))


def test_unsuitable_head_size_is_left_to_the_next():
    spec = AttentionSpec("odd", 1, 2, 2, 1, 20, 16, "float32")
    with pytest.raises(NotImplementedError, match="head size"):
        check(spec, implementation="triton", interpret=True)
    check(dataclasses.replace(spec))
