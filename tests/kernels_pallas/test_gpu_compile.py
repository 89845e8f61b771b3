"""Kernels lowered for CUDA and compiled for GPUs: no register spills, and bounded temporaries."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import masked_acceptance, ragged_attention
from kernels_pallas.arg_specs import ACCEPTANCE_SPECS, ATTENTION_SPECS
from kernels_pallas.graph_capture import is_one_graph
from tests.gpu_compile import compile_for, lower_for, needs_gpu_compiler, thunks_for
from tests.marks import mostly_slow

ATTENTION_BY_NAME = {spec.name: spec for spec in ATTENTION_SPECS}
ACCEPTANCE_BY_NAME = {spec.name: spec for spec in ACCEPTANCE_SPECS}
HAS_INT8 = jax.__version_info__ >= (0, 12)
MOSAIC_SPECS = [
    spec.name for spec in ATTENTION_SPECS if spec.dtype != "float32" and (HAS_INT8 or not spec.is_quantized)
]
FORM_SPECS = ("phi2", "llama3_8b_int8", "gpt_oss_20b", "llama4_scout")
MEGABYTE = 1 << 20


def attention(arguments, spec, **options):
    return ragged_attention(**arguments, **spec.options, **options)


def acceptance(arguments, **options):
    return masked_acceptance(**arguments, **options)


def attention_temporaries(spec, **options):
    """Returns the bytes of temporaries after a compilation for `options["device"]`."""
    device = options.pop("device")
    function = functools.partial(attention, spec=spec, **options)
    return compile_for(function, spec.shapes(), device=device).memory_analysis().temp_size_in_bytes


def assert_no_cache_copy(spec, num_bytes):
    """Checks that the temporaries are only the partial results of the splits, which are small relative to a cache."""
    cache = spec.shapes()["k_cache"]
    # A quarter for the partial results, and more for padding the last tile of query rows.
    assert num_bytes < cache.size * cache.dtype.itemsize / 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION_BY_NAME)
def test_triton_attention_lowers(name):
    spec = ATTENTION_BY_NAME[name]
    for form in ("pad", "split", "ragged"):
        text = lower_for(functools.partial(attention, spec=spec, form=form, implementation="triton"), spec.shapes())
        calls = text.as_text().count("stablehlo.custom_call @__gpu$xla.gpu.triton")
        assert calls == (spec.batch if form == "split" else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["smollm2_135m", "mistral_7b", "gpt_oss_20b", "llama4_scout"],
)
def test_mosaic_gpu_attention_lowers(name):
    spec = ATTENTION_BY_NAME[name]
    for form, num_calls in (("pad", 1), ("ragged", 1), ("split", spec.batch)):
        function = functools.partial(attention, spec=spec, form=form, implementation="mosaic_gpu")
        assert lower_for(function, spec.shapes()).as_text().count("stablehlo.custom_call @mosaic_gpu") == num_calls


@pytest.mark.parametrize("name", mostly_slow(["smollm2_135m", "qwen3_8b_ngram"], lambda name: name == "smollm2_135m"))
def test_mosaic_gpu_acceptance_lowers(name):
    function = functools.partial(acceptance, implementation="mosaic_gpu")
    text = lower_for(function, ACCEPTANCE_BY_NAME[name].shapes()).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize("name", mostly_slow(ACCEPTANCE_BY_NAME, lambda name: name == "smollm2_135m"))
def test_triton_acceptance_lowers(name):
    function = functools.partial(acceptance, implementation="triton")
    text = lower_for(function, ACCEPTANCE_BY_NAME[name].shapes()).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3


def on_each_card(names, *quick):
    """Returns every (name, device) for H200 and A100; those that are not `quick` are slow tests."""
    return mostly_slow([(name, device) for device in ("H200", "A100") for name in names], lambda case: case in quick)


@needs_gpu_compiler
@pytest.mark.parametrize(
    "name, device", on_each_card(ATTENTION_BY_NAME, ("phi2_f32", "H200"), ("smollm2_135m", "A100"))
)
def test_triton_attention_compiles(name, device):
    spec = ATTENTION_BY_NAME[name]
    assert_no_cache_copy(spec, attention_temporaries(spec, implementation="triton", device=device))


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 33])
def test_every_height_of_tile_compiles(num_tokens, device):
    """The register budget depends on the block height and the grouping; head size 64 has spilled before."""
    spec = dataclasses.replace(ATTENTION_BY_NAME["smollm2_135m"], num_tokens=num_tokens)
    assert_no_cache_copy(spec, attention_temporaries(spec, implementation="triton", device=device))


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("form", ["pad", "split"])
@pytest.mark.parametrize("name", FORM_SPECS)
def test_triton_forms_compile(name, form):
    spec = ATTENTION_BY_NAME[name]
    assert_no_cache_copy(spec, attention_temporaries(spec, implementation="triton", form=form, device="H200"))


@needs_gpu_compiler
@pytest.mark.parametrize("name", mostly_slow(MOSAIC_SPECS, lambda name: name == "mistral_7b_paged"))
def test_mosaic_gpu_attention_compiles(name, monkeypatch, capfd):
    """Mosaic GPU calls ptxas itself, which reports spills instead of failing."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    spec = ATTENTION_BY_NAME[name]
    assert_no_cache_copy(spec, attention_temporaries(spec, implementation="mosaic_gpu", device="H200"))
    spills = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert spills and set(spills) == {"0"}


@needs_gpu_compiler
@pytest.mark.slow
def test_mosaic_gpu_compiles_with_capped_scores():
    spec = dataclasses.replace(ATTENTION_BY_NAME["mistral_7b"], soft_cap=50.0)
    assert_no_cache_copy(spec, attention_temporaries(spec, implementation="mosaic_gpu", device="H200"))


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("form", ["pad", "split"])
def test_mosaic_gpu_forms_compile(form):
    spec = ATTENTION_BY_NAME["mistral_7b"]
    assert_no_cache_copy(spec, attention_temporaries(spec, implementation="mosaic_gpu", form=form, device="H200"))


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("device, kernel", [("H200", "mosaic_gpu"), ("A100", "triton")])
def test_default_is_the_best_kernel_of_the_target(device, kernel):
    """The target is the device that the function is compiled for, not the present device."""
    # Shapes of no other test: a kernel that was compiled before is not compiled again and reports no spills.
    spec = dataclasses.replace(ATTENTION_BY_NAME["llama3_8b"], num_tokens=3)
    small = dataclasses.replace(ACCEPTANCE_BY_NAME["smollm2_135m"], vocab_size=4096)
    attends = functools.partial(attention, spec=spec)
    for function, shapes, best in ((attends, spec.shapes(), kernel), (acceptance, small.shapes(), "triton")):
        text = compile_for(function, shapes, device=device).as_text()
        assert ("mosaic_gpu" in text) == (best == "mosaic_gpu")
        assert ("__gpu$xla.gpu.triton" in text or "triton_kernel_call" in text) == (best == "triton")


@needs_gpu_compiler
@pytest.mark.parametrize("name, device", on_each_card(ACCEPTANCE_BY_NAME))
def test_triton_acceptance_compiles_within_a_megabyte(name, device):
    """Nothing of the vocabulary's size is written: with V = 152k, B = 16 and G = 8 it would have 88 MB."""
    function = functools.partial(acceptance, implementation="triton")
    compiled = compile_for(function, ACCEPTANCE_BY_NAME[name].shapes(), device=device)
    assert compiled.memory_analysis().temp_size_in_bytes < MEGABYTE
    assert " sort(" not in compiled.as_text()


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ACCEPTANCE_BY_NAME if name != "gpt2_f16"])
def test_mosaic_gpu_acceptance_compiles_within_a_megabyte(name, monkeypatch, capfd):
    """Also checks that Mosaic GPU's own call of ptxas reports no spills."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    function = functools.partial(acceptance, implementation="mosaic_gpu")
    compiled = compile_for(function, ACCEPTANCE_BY_NAME[name].shapes())
    assert compiled.memory_analysis().temp_size_in_bytes < MEGABYTE
    assert " sort(" not in compiled.as_text()
    spills = re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr()))
    assert spills and set(spills) == {"0"}


@pytest.mark.slow
def test_blackwell_uses_triton_for_attention():
    """Its tensor cores have no wgmma.

    Lowered only, because Mosaic GPU's ptxas refuses a second generation of cards in one process.
    """
    acceptance_text = lower_for(acceptance, ACCEPTANCE_BY_NAME["smollm2_135m"].shapes(), device="B200").as_text()
    assert acceptance_text.count("stablehlo.custom_call @mosaic_gpu") == 3
    spec = ATTENTION_BY_NAME["llama3_8b"]
    text = lower_for(functools.partial(attention, spec=spec), spec.shapes(), device="B200").as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1
    assert "stablehlo.custom_call @mosaic_gpu" not in text


@needs_gpu_compiler
def test_attention_is_one_graph_of_few_kernels():
    """They are the clipping of the lengths, the packing of the queries, the kernel and the merge of the splits."""
    for name, implementation in (("llama3_8b", "mosaic_gpu"), ("phi2", "triton")):
        spec = dataclasses.replace(ATTENTION_BY_NAME[name], num_tokens=4)
        function = functools.partial(attention, spec=spec, implementation=implementation)
        # By default XLA makes no graph of so few kernels.
        thunks = thunks_for(function, spec.shapes(), compiler_options={"xla_gpu_graph_min_graph_size": 1})
        assert is_one_graph(thunks)
        assert len(thunks) <= 5, thunks


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_acceptance_is_one_graph_of_few_kernels(implementation):
    function = functools.partial(acceptance, implementation=implementation)
    thunks = thunks_for(function, ACCEPTANCE_BY_NAME["qwen3_8b"].shapes())
    assert is_one_graph(thunks)
    assert len(thunks) <= 14, thunks


@pytest.mark.slow
@needs_gpu_compiler
def test_spill_is_an_error():
    """The negative control of all tests above: a kernel that needs too many registers does not compile."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    from kernels_pallas.targets import silence_triton_deprecation

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = plgpu.dot(x_ref[...], y_ref[...])

    def product(x, y):
        silence_triton_deprecation()
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((64, 256), jnp.float32),
            compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        )(x, y)

    shapes = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 256), jnp.bfloat16))
    for device in ("H200", "A100"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
            compile_for(product, *shapes, device=device)
