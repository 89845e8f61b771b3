"""Ragged attention: every implementation, form and spec against the reference, in interpreters."""

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
from kernels_pallas.attention.arguments import AttentionInputs, ScoreOptions
from kernels_pallas.attention.mosaic_gpu import ragged_attention_mosaic_gpu
from kernels_pallas.attention.packing import gather_pages
from kernels_pallas.attention.triton import ragged_attention_triton
from kernels_pallas.tuning import AttentionTiles
from tests.kernels_pallas.closeness import assert_close
from tests.marks import mostly_slow

SPEC_BY_NAME = {spec.name: spec for spec in ATTENTION_SPECS}
# The other forms differ from "ragged" only in where a walk ends, so one spec per kind of number is enough.
FORM_SPECS = ("smollm2_135m", "phi2_f32", "llama3_8b_int8", "mistral_7b", "gpt_oss_20b")
CACHES = {"k_cache", "v_cache", "k_scale", "v_scale"}


@jax.jit
def with_nan_past_the_end(arguments):
    """Writes NaN (127 in an INT8 cache) to every position past each row's last real query."""
    total = arguments["lengths"] + arguments["num_queries"]
    result = dict(arguments)
    if "tables" in arguments:
        tables, (num_pages, _, page_size, _) = arguments["tables"], arguments["k_cache"].shape
        is_past = jnp.arange(tables.shape[1] * page_size) >= total[:, None]
        is_past = jnp.zeros((num_pages, page_size), bool).at[tables].set(is_past.reshape(*tables.shape, page_size))
        for name in ("k_cache", "v_cache"):
            result[name] = jnp.where(is_past[:, None, :, None], jnp.nan, arguments[name])
        return result
    for name in CACHES & arguments.keys():
        values = arguments[name]
        is_past = jnp.arange(values.shape[2]) >= total[:, None, None]
        filling = 127 if values.dtype == jnp.int8 else jnp.nan
        result[name] = jnp.where(is_past.reshape(is_past.shape + (1,) * (values.ndim - 3)), filling, values)
    return result


@functools.partial(jax.jit, static_argnames=("window", "soft_cap", "chunk", "form", "implementation"))
def _run(arguments, **options):
    return ragged_attention(**arguments, **options, interpret=True)


@functools.partial(jax.jit, static_argnames=("window", "soft_cap", "chunk"))
def _expect(arguments, **options):
    return reference.ragged_attention(**arguments, **options)


# The results are on the host, because jax compiles every operation outside of a jitted function.
def run(arguments, **options):
    return jax.device_get(_run(arguments, **options))


def expect(arguments, **options):
    return jax.device_get(_expect(arguments, **options))


def check(spec: AttentionSpec, **options):
    arguments = attention_arguments(spec)
    expected = expect(arguments, **spec.options)
    out = run(with_nan_past_the_end(arguments), **spec.options, **options)
    assert out.dtype == arguments["q"].dtype
    assert_close(out, expected)


def kernel_inputs(spec, arguments):
    """Returns the positional arguments of a kernel."""
    return AttentionInputs(**arguments), ScoreOptions(spec.window, spec.head_dim**-0.5, spec.soft_cap, spec.chunk)


# A soft cap with a window, INT8, pages, sinks with a window, and chunks. Other quick tests have float32.
QUICK_TRITON = (
    "gemma2_2b",
    "llama3_8b_int8",
    "llama3_8b_paged",
    "gpt_oss_20b_window",
    "llama4_scout",
)


@pytest.mark.parametrize("name", mostly_slow(SPEC_BY_NAME, lambda name: name in QUICK_TRITON))
def test_triton_equals_reference(name):
    check(SPEC_BY_NAME[name].reduced(), implementation="triton")


# Every head size, both 16-bit floats, INT8, a window, a cap and several tiles; wgmma has no float32.
MOSAIC_SPECS = "smollm2_135m phi2 phi3_mini llama3_8b_f16 llama3_8b_int8 mistral_7b gemma2_2b llama3_8b_long_draft"
QUICK_MOSAIC = ("llama3_8b_paged", "gpt_oss_20b_window")


def blocks_of_64(spec):
    """Returns the reduced spec with a capacity that the Mosaic GPU kernel supports, and few rows."""
    return dataclasses.replace(spec.reduced(), batch=3, capacity=192)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        (*MOSAIC_SPECS.split(), "llama3_8b_paged", "gpt_oss_20b", "gpt_oss_20b_window", "llama4_scout"),
        lambda name: name in QUICK_MOSAIC,
    ),
)
def test_mosaic_gpu_equals_reference(name):
    check(blocks_of_64(SPEC_BY_NAME[name]), implementation="mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral_7b", "gpt_oss_20b"])
@pytest.mark.parametrize("form, num_splits", [("pad", 2), ("split", 1), ("ragged", 2)])
def test_mosaic_gpu_forms_equal_reference(name, form, num_splits):
    spec = blocks_of_64(SPEC_BY_NAME[name])
    arguments = attention_arguments(spec)
    options = {"form": form, "tiles": AttentionTiles(64, 64, num_splits, 4, 2), "interpret": True}
    run_kernel = jax.jit(lambda arguments: ragged_attention_mosaic_gpu(*kernel_inputs(spec, arguments), **options))
    out = run_kernel(with_nan_past_the_end(arguments))
    assert_close(out, expect(arguments, **spec.options))


@pytest.mark.slow
def test_mosaic_gpu_caps_scores():
    spec = dataclasses.replace(blocks_of_64(SPEC_BY_NAME["smollm2_135m"]), soft_cap=1.5)
    check(spec, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("smollm2_135m_f32", {}, "bfloat16 or float16, not float32"),
        ("smollm2_135m", {"head_dim": 72}, "head size that 16 divides"),
        ("smollm2_135m", {"head_dim": 192}, "that 128 divides, not 192"),
        ("smollm2_135m", {"capacity": 100}, "capacity that 64 divides, not 100"),
    ],
)
def test_mosaic_gpu_refuses_what_it_does_not_support(name, changes, message):
    spec = dataclasses.replace(blocks_of_64(SPEC_BY_NAME[name]), **changes)
    with pytest.raises(NotImplementedError, match=message):
        check(spec, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "name, form",
    mostly_slow(
        [(name, form) for name in FORM_SPECS for form in ("pad", "split")],
        lambda case: case == ("mistral_7b", "pad"),
    ),
)
def test_triton_forms_equal_reference(name, form):
    check(SPEC_BY_NAME[name].reduced(), implementation="triton", form=form)


@pytest.mark.parametrize(
    "name, num_splits, block_m, form",
    mostly_slow(
        [
            (*case, form)
            for case in (("phi2_f32", 2, 16), ("mistral_7b", 5, 64), ("gpt_oss_20b", 3, 32))
            for form in ("pad", "split", "ragged")
        ],
        lambda case: case == ("mistral_7b", 5, 64, "ragged"),
    ),
)
def test_splits_of_a_walk_merge(name, num_splits, block_m, form):
    """Several programs share a row, some of them without blocks; several tiles share a kv head."""
    spec = SPEC_BY_NAME[name].reduced()
    arguments = attention_arguments(spec)
    expected = expect(arguments, **spec.options)
    options = {"form": form, "tiles": AttentionTiles(block_m, 16, num_splits, 4, 2), "interpret": True}
    run_kernel = jax.jit(lambda arguments: ragged_attention_triton(*kernel_inputs(spec, arguments), **options))
    out = run_kernel(with_nan_past_the_end(arguments))
    assert_close(out, expected)


@pytest.mark.parametrize("name", mostly_slow(SPEC_BY_NAME, lambda name: name in QUICK_TRITON))
def test_xla_equals_reference(name):
    check(SPEC_BY_NAME[name].reduced(), implementation="xla")


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_a_paged_cache_gives_the_bits_of_a_dense_cache(implementation):
    """Pages may be in any order, and unused entries of the tables may have any value."""
    spec = dataclasses.replace(SPEC_BY_NAME["smollm2_135m_f32_paged"].reduced(), page_size=32)
    arguments = attention_arguments(spec)
    dense = {name: gather_pages(arguments[name], arguments["tables"]) for name in ("k_cache", "v_cache")}
    others = {name: arguments[name] for name in ("q", "lengths", "num_queries")}
    num_used = -(-(arguments["lengths"] + arguments["num_queries"]) // 32)
    is_used = jnp.arange(spec.capacity // 32) < num_used[:, None]
    tables = jnp.where(is_used, arguments["tables"], 10**6)
    expected = run(others | dense, implementation=implementation)
    found = run(arguments | {"tables": tables}, implementation=implementation)
    np.testing.assert_array_equal(found, expected)


def test_pages_of_int8():
    """Only XLA supports them."""
    spec = AttentionSpec("int8", 2, 3, 4, 2, 16, 48, "float32", is_quantized=True)
    arguments = attention_arguments(spec)
    expected = expect(arguments)
    tables = np.array([[4, 1, 3], [0, 5, 2]], np.int32)
    paged = {}
    for name in CACHES:
        whole = np.asarray(arguments[name])
        values = np.moveaxis(whole.reshape(2, 2, 3, 16, *whole.shape[3:]), 1, 2)
        pages = np.zeros((6, *values.shape[2:]), values.dtype)
        pages[tables] = values
        paged[name] = jnp.asarray(pages)
    arguments |= paged | {"tables": jnp.asarray(tables)}
    assert_close(run(arguments), expected)
    assert_close(expect(arguments), expected)
    with pytest.raises(NotImplementedError, match="INT8"):
        ragged_attention(**arguments, implementation="triton", interpret=True)


def test_pages_smaller_than_a_block_use_the_next_implementation():
    spec = dataclasses.replace(SPEC_BY_NAME["llama3_8b_paged"].reduced(), page_size=24, capacity=96)
    arguments = attention_arguments(spec)
    tiles = AttentionTiles(16, 16, 1, 4, 2)
    with pytest.raises(NotImplementedError, match="pages that its block of 16 divides, not of 24"):
        ragged_attention_triton(*kernel_inputs(spec, arguments), form="ragged", tiles=tiles, interpret=True)
    check(spec)


@pytest.mark.parametrize("num_tokens", mostly_slow([64, 256], lambda num_tokens: num_tokens == 64))
def test_prefill_chunk_falls_through_to_xla(num_tokens):
    spec = AttentionSpec("prefill", 2, num_tokens, 4, 2, 32, 300, "float32")
    check(spec)
    with pytest.raises(NotImplementedError, match="query tokens"):
        check(spec, implementation="triton")


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("lengths", [[-3, 10**6, 4, 0], [2**31 - 1, -(2**31), 4, 0]])
def test_lengths_out_of_range_do_not_affect_other_rows(implementation, lengths):
    spec = AttentionSpec("garbage", 4, 3, 4, 2, 32, 48, "float32")
    arguments = attention_arguments(spec, lengths=np.array([0, 0, 4, 0], np.int32))
    arguments["num_queries"] = jnp.array([3, 3, 3, 2], jnp.int32)
    expected = expect(arguments)
    arguments = with_nan_past_the_end(arguments) | {"lengths": jnp.asarray(lengths, jnp.int32)}
    out = run(arguments, implementation=implementation)
    assert_close(out[2:], expected[2:])


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_row_near_its_capacity_uses_fewer_queries(implementation):
    """A row with room for 2 of the 5 tokens: the others' positions are outside its cache."""
    spec = AttentionSpec("full", 1, 5, 4, 2, 32, 48, "float32")
    arguments = attention_arguments(spec, lengths=np.array([46], np.int32))
    arguments["num_queries"] = jnp.array([2], jnp.int32)
    out = run(arguments, implementation=implementation)
    assert_close(out, expect(arguments))
    assert not out[:, 2:].any()


@pytest.mark.parametrize(
    "implementation", mostly_slow(["triton", "mosaic_gpu", "xla"], lambda name: name != "mosaic_gpu")
)
def test_rows_without_queries_are_zero_if_their_cache_holds_nan(implementation):
    spec = AttentionSpec("none", 3, 3, 4, 2, 64, 128, "float16")
    arguments = attention_arguments(spec, lengths=np.array([20, 9, 9], np.int32))
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].at[:2].set(jnp.nan)
    arguments["lengths"] = jnp.array([20, 10**6, 9], jnp.int32)
    arguments["num_queries"] = jnp.array([0, 0, 3], jnp.int32)
    out = run(arguments, implementation=implementation)
    assert not out[:2].any()
    assert out[2].any()
    assert np.isfinite(out).all()


# Few shapes, so that few programs are compiled; the random lengths and counts are traced.
RANDOM_SPECS = (
    AttentionSpec("multi_head", 3, 1, 3, 3, 16, 70, "float32", None, True),
    AttentionSpec("groups_of_7", 3, 7, 14, 2, 48, 133, "float32", 9, soft_cap=1.5),
    AttentionSpec("one_kv_head", 3, 33, 12, 1, 64, 90, "float32"),
)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pad", "split", "ragged"])
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(spec=st.sampled_from(RANDOM_SPECS), data=st.data())
def test_any_length_and_count(form, spec, data):
    lengths = data.draw(st.lists(st.integers(0, spec.capacity - spec.num_tokens), min_size=3, max_size=3))
    counts = data.draw(st.lists(st.integers(0, spec.num_tokens), min_size=3, max_size=3))
    arguments = attention_arguments(spec, lengths=np.array(lengths, np.int32))
    arguments["num_queries"] = jnp.array(counts, jnp.int32)
    expected = expect(arguments, **spec.options)
    for choice in ({"implementation": "triton", "form": form}, {"implementation": "xla"}):
        out = run(with_nan_past_the_end(arguments), **spec.options, **choice)
        assert_close(out, expected)


@pytest.mark.parametrize(
    ("implementation", "has_sinks"),
    mostly_slow(
        [("triton", False), ("triton", True), ("xla", False), ("xla", True)], lambda case: case != ("triton", True)
    ),
)
def test_equals_a_numpy_loop(implementation, has_sinks):
    """An independent loop in NumPy checks the reference itself."""
    spec = AttentionSpec("tiny", 2, 3, 4, 2, 16, 20, "float32", window=4, soft_cap=0.7)
    arguments = attention_arguments(spec)
    q, k, v, lengths, num_queries = (np.asarray(arguments[n]) for n in spec.shapes())
    expected = np.zeros_like(q)
    sinks = np.array([0.3, -2.0, 5.0, 40.0], np.float32)
    for b in range(2):
        for t in range(num_queries[b]):
            last = lengths[b] + t
            seen = slice(max(0, last - 3), last + 1)
            for n in range(4):
                scores = 0.7 * np.tanh(k[b, n // 2, seen] @ q[b, t, n] / 4.0 / 0.7)
                weights = np.exp(scores)
                total = weights.sum() + (np.exp(sinks[n]) if has_sinks else 0.0)
                expected[b, t, n] = weights @ v[b, n // 2, seen] / total
    options = spec.options
    arguments |= {"sinks": jnp.asarray(sinks)} if has_sinks else {}
    np.testing.assert_allclose(expect(arguments, **options), expected, atol=1e-6)
    out = run(arguments, **options, implementation=implementation)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_a_query_sees_its_own_chunk_only(chunk):
    spec = AttentionSpec("chunks", 2, 3, 4, 2, 16, 20, "float32")
    arguments = attention_arguments(spec)
    q, k, v, lengths, num_queries = (np.asarray(arguments[n]) for n in spec.shapes())
    expected = np.zeros_like(q)
    for b in range(2):
        for t in range(num_queries[b]):
            last = lengths[b] + t
            seen = [position for position in range(last + 1) if position // chunk == last // chunk]
            for n in range(4):
                weights = np.exp(k[b, n // 2, seen] @ q[b, t, n] / 4.0)
                expected[b, t, n] = weights @ v[b, n // 2, seen] / weights.sum()
    for function, error in ((reference.ragged_attention, 1e-6), (ragged_attention, 2e-6)):
        found = jax.jit(functools.partial(function, chunk=chunk))(**arguments)
        np.testing.assert_allclose(found, expected, atol=error)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("chunk", [5, 64, 70])
def test_kernels_end_and_begin_chunks(implementation, chunk):
    """The tokens of a row are in one chunk or in two; a chunk may begin within a block, or where another ends."""
    spec = AttentionSpec("chunks", 6, 5, 4, 2, 64, 192, "bfloat16", chunk=chunk)
    arguments = attention_arguments(spec, lengths=np.array([0, 63, 64, 67, 70, 139], np.int32))
    arguments["num_queries"] = jnp.array([5, 5, 4, 5, 5, 3], jnp.int32)
    expected = expect(arguments, **spec.options)
    assert_close(run(with_nan_past_the_end(arguments), **spec.options, implementation=implementation), expected)


def test_chunks_shorter_than_a_pass_use_xla():
    spec = AttentionSpec("chunks", 2, 5, 4, 2, 16, 64, "float32", chunk=4)
    with pytest.raises(NotImplementedError, match="chunks of at least the 5 query tokens, not 4"):
        check(spec, implementation="triton")
    check(spec)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_kernels_refuse_heads_of_latent_attention(implementation):
    """The head of DeepSeek-V3 is computed by XLA, and its values may be the array of its keys."""
    spec = AttentionSpec("latent", 2, 3, 4, 1, 576, 64, "bfloat16")
    arguments = attention_arguments(spec)
    arguments |= {"v_cache": arguments["k_cache"]}
    with pytest.raises(NotImplementedError, match="heads of at most 256, not 576"):
        run(arguments, implementation=implementation)
    assert_close(run(arguments), expect(arguments))


@pytest.mark.parametrize("implementation", mostly_slow(["triton", "mosaic_gpu", "xla"], lambda name: name == "xla"))
def test_a_large_sink_takes_all_weight(implementation):
    """Its exponential exceeds float32, as do the scores'; the sum is relative to the larger of both."""
    spec = AttentionSpec("sinks", 2, 3, 4, 2, 64, 64, "bfloat16", has_sinks=True)
    arguments = attention_arguments(spec, lengths=np.array([0, 40], np.int32))
    arguments["num_queries"] = jnp.array([3, 2], jnp.int32)
    arguments["sinks"] = jnp.array([-jnp.inf, -1e4, 1e4, 0.0])
    expected = expect({name: value for name, value in arguments.items() if name != "sinks"})
    out = run(arguments, implementation=implementation)
    assert_close(out[:, :, :2], expected[:, :, :2])
    assert not out[:, :, 2].any()
    assert_close(out[:, :, 3], expect(arguments)[:, :, 3])


@pytest.mark.parametrize("implementation", mostly_slow(["mosaic_gpu", "triton", "xla"], lambda name: name == "triton"))
def test_runs_in_a_while_loop(implementation):
    dtype = "bfloat16" if implementation == "mosaic_gpu" else "float32"
    spec = AttentionSpec("loop", 2, 2, 4, 2, 64, 64, dtype)
    arguments = attention_arguments(spec, lengths=np.array([0, 5], np.int32))
    del arguments["num_queries"]

    @jax.jit
    def loop(arguments):
        def body(carry):
            step, lengths, outs = carry
            out = ragged_attention(**arguments | {"lengths": lengths}, implementation=implementation, interpret=True)
            return step + 1, lengths + 2, outs.at[step].set(out)

        start = (0, arguments["lengths"], jnp.zeros((3, *arguments["q"].shape), dtype))
        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, start)[2]

    expected = [expect(arguments | {"lengths": arguments["lengths"] + 2 * step}) for step in range(3)]
    assert_close(loop(arguments), np.stack(expected))


def test_quantize_kv_rounds_to_half_a_step():
    values = np.random.default_rng(0).normal(size=(2, 3, 5, 16)).astype(np.float32)
    values[0, 0, 0] = 0.0
    quantized, scale = jax.jit(quantize_kv)(values)
    assert quantized.dtype == jnp.int8 and scale.shape == (2, 3, 5)
    quantized, scale, values = jax.device_get((quantized, scale, values))
    error = np.abs(quantized * scale[..., None] - values)
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
        ({"chunk": 0}, "chunk is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; expected a positive number"),
        ({"sinks": jnp.zeros(3)}, r"sinks has shape \(3,\): expected \(4,\)"),
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
    ],
)
def test_errors_name_the_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        ragged_attention(**arguments_of(**changes))


def test_unsupported_head_size_uses_the_next_implementation():
    spec = AttentionSpec("odd", 1, 2, 2, 1, 20, 16, "float32")
    with pytest.raises(NotImplementedError, match="head size"):
        check(spec, implementation="triton")
    check(dataclasses.replace(spec))
