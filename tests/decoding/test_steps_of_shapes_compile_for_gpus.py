"""Whole steps with the shapes of published models compiled for GPUs: INT8, several devices, and a grid of shapes."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import bass_jax as bass
from bass_jax.models import preset
from bass_jax.models.sharding import param_shardings
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS, is_one_graph
from tests.abstract import abstract_pair, abstract_state, num_bytes, of_depth
from tests.gpu_compile import compile_with_thunks_for, needs_gpu_compiler

pytestmark = needs_gpu_compiler
CAPACITY = 2048

# The pair of the BASS paper, and a smaller pair of recent models with the same vocabulary size.
SHAPES = {
    "7.8b": (preset("bass-7.8b"), preset("bass-draft-a-310m")),
    "1b": (
        preset("llama-3.2-1b"),
        dataclasses.replace(preset("smollm2-135m"), vocab_size=preset("llama-3.2-1b").vocab_size),
    ),
    "30b-a3b": (preset("qwen3-30b-a3b"), preset("qwen3-0.6b")),
    "v2-lite": (preset("deepseek-v2-lite"), preset("qwen3-0.6b")),
    "35b-a3b": (preset("qwen3.5-35b-a3b"), preset("qwen3-0.6b")),
}
DENSE = ("7.8b", "1b")
TYPES = {"bf16": "bfloat16", "f32": "float32", "s8": "int8"}


@functools.cache
def compiled(shape, batch, draft_len, device, *, layers=None, quantize=None, cache_dtype=None, num_devices=1):
    """Compiles a step.

    `layers` are those of the target and the draft model; default all. With 0 draft layers the drafter is prompt lookup.
    """
    target, draft = SHAPES[shape]
    if layers is not None:
        target, draft = of_depth(target, layers[0]), of_depth(draft, layers[1]) if layers[1] else None
    target = dataclasses.replace(target, quantize=quantize, cache_dtype=cache_dtype)
    if num_devices > 1:  # The draft model is replicated.
        target = dataclasses.replace(target, tensor_axis="tp")
    pair = abstract_pair(target, draft)
    state = abstract_state(pair, batch, CAPACITY)
    spec = bass.SpecConfig(draft_len=draft_len, acceptance="token")

    def place(mesh):
        replicated = NamedSharding(mesh, PartitionSpec())
        heads = NamedSharding(mesh, PartitionSpec(None, "tp"))
        pairs = jax.tree.map(lambda _: replicated, pair)
        target = dataclasses.replace(pair.target, params=param_shardings(pair.target.config, mesh))
        states = jax.tree.map(lambda _: replicated, state)
        caches = jax.tree.map(lambda _: heads, state.target_cache)
        return dataclasses.replace(pairs, target=target), states._replace(target_cache=caches)

    def run(pair, state):
        return bass.speculate_step(pair, state, spec)

    executable, thunks = compile_with_thunks_for(
        run,
        pair,
        state,
        device=device,
        compiler_options=ONE_GRAPH_OPTIONS,
        donate_argnums=1,
        num_devices=num_devices,
        place=None if num_devices == 1 else place,
    )
    return pair, state, executable, thunks


def results(text: str, operation: str) -> list[tuple[str, int]]:
    """Returns dtype and size of every result of an operation in optimized HLO, outside of fusions."""
    found = []
    for computation in re.split(r"\n(?=\S)", text):
        if computation.startswith(("%fused", "%wrapped", "%triton", "%gemm", "%region", "fused")):
            continue
        for kind, shape in re.findall(rf"= (\w+)\[([\d,]*)\][^=]*? {operation}\(", computation):
            found.append((kind, math.prod(int(size) for size in shape.split(",")) if shape else 1))
    return found


def smallest_weight(pair: bass.Pair) -> int:
    """Returns the size of the smallest INT8 matrix of the target."""
    return min(leaf.size for leaf in jax.tree.leaves(pair.target.params) if leaf.dtype == "int8")


def assert_step(pair, state, executable, thunks, draft_len, *, share=0.02):
    """Asserts one graph, caches in place, and small temporaries.

    Temporaries can be a small share of the parameters, or the distributions that the rule reads and 15 % more. With a
    vocabulary of 128,256 the distributions of 16 rows, 8 drafts and 9 positions each, are 5 % of the parameters of a 1B
    pair; those of the 7.8B pair, 4 drafts, are most of the temporaries of a step of two layers.
    """
    assert is_one_graph(thunks)
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes((state.target_cache, state.drafter_state.cache))
    parameters = num_bytes((pair.target.params, pair.drafter.model.params))
    distributions = 4 * len(state.lengths) * (2 * draft_len + 1) * pair.target.config.vocab_size
    found = memory.temp_size_in_bytes
    assert found < max(share * parameters, 1.15 * distributions), (found, parameters, distributions)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "mode"), list(itertools.product(("H200", "A100"), ("int8", "int8_activations"))))
def test_int8_weights_are_cast_inside_the_products(device, mode):
    """No kernel writes a converted weight, and no temporary is as large as one."""
    pair, state, executable, thunks = compiled("7.8b", 8, 4, device, layers=(1, 0), quantize=mode, cache_dtype="int8")
    assert is_one_graph(thunks)
    weight = smallest_weight(pair)
    written = results(executable.as_text(), "(?:convert|fusion|copy|transpose)")
    caches = {leaf.size for leaf in jax.tree.leaves(state.target_cache)}
    assert not [found for found in written if found[1] >= weight and found[1] not in caches]
    memory = executable.memory_analysis().temp_size_in_bytes
    assert memory < 2 * weight, f"{memory} bytes of temporaries"


def test_a_converted_copy_of_a_weight_is_found():
    """The negative control of the test above: a barrier keeps the conversion outside of the product."""
    x, weight = jax.ShapeDtypeStruct((40, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 4096), "int8")
    executable, _ = compile_with_thunks_for(
        lambda x, w: x @ jax.lax.optimization_barrier(w.astype("bfloat16")), x, weight
    )
    assert [found for found in results(executable.as_text(), "(?:convert|fusion)") if found[1] >= 4096 * 4096]
    assert executable.memory_analysis().temp_size_in_bytes >= 2 * 4096 * 4096


def test_int8_weights_are_half_as_large_as_bfloat16_weights():
    config = of_depth(SHAPES["7.8b"][0], 2)
    models = [abstract_pair(one, None).target for one in (config, dataclasses.replace(config, quantize="int8"))]
    assert num_bytes(models[1].params) < 0.51 * num_bytes(models[0].params)


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "mode"), list(itertools.product((2, 4), (None, "int8", "int8_activations"))))
def test_devices_exchange_neither_weights_nor_caches(num_devices, mode):
    """They exchange activations and logits, which are much smaller."""
    pair, state, executable, _ = compiled("1b", 8, 4, "H200", layers=(2, 1), num_devices=num_devices, quantize=mode)
    text = executable.as_text()
    exchanged = [
        found
        for operation in ("all-gather", "all-gather-start", "all-to-all", "collective-permute", "all-reduce")
        for found in results(text, operation)
    ]
    assert exchanged, "expected the devices to add up their parts"
    largest = 8 * 5 * pair.target.config.vocab_size
    assert max(size for _, size in exchanged) <= largest, sorted(exchanged, key=lambda found: found[1])[-3:]
    sharded, replicated = (pair.target.params, state.target_cache), (pair.drafter.model.params, state.drafter_state)
    found = executable.memory_analysis().argument_size_in_bytes
    assert found < 1.02 * (num_bytes(sharded) / num_devices + num_bytes(replicated))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "batch"), [("H200", 8), ("A100", 64)])
def test_experts_are_not_copied(device, batch):
    """Two layers of the target. Its experts are read where they are, by two grouped products per layer."""
    pair, state, executable, thunks = compiled("30b-a3b", batch, 4, device, layers=(2, 0))
    assert is_one_graph(thunks)
    assert sum("grouped_product" in thunk.name for thunk in thunks) == 4
    assert sum("blocks_of_groups" in thunk.name for thunk in thunks) == 2
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(state.target_cache)
    experts = pair.target.params["layer_0"]["mlp"]["experts_down"]
    assert memory.temp_size_in_bytes < num_bytes(experts) / 4 + 12 * batch * 5 * pair.target.config.vocab_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "num_layers", "device"), [("v2-lite", 2, "H200"), ("v2-lite", 2, "A100"), ("35b-a3b", 4, "H200")]
)
def test_latent_attention_and_recurrent_layers_are_in_one_graph(shape, num_layers, device):
    """Caches and states are updated in place. DeepSeek-V2-Lite's first layer is dense; the others have experts.

    For an A100 one of XLA's fusions of the recurrent layers spills 4 bytes, which these tests refuse.
    """
    pair, state, executable, thunks = compiled(shape, 8, 4, device, layers=(num_layers, 0))
    assert is_one_graph(thunks)
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(state.target_cache)
    assert memory.temp_size_in_bytes < 0.03 * num_bytes(pair.target.params)


def whole_steps() -> list[tuple[str, str, int, int]]:
    """Returns the largest step of every shape and device, and the others of every shape on the devices in turns."""
    sizes = [*itertools.product((1, 8, 16), (4, 8))]
    return [
        (shape, device, *size)
        for i, shape in enumerate(DENSE)
        for j, device in enumerate(("H200", "A100"))
        for k, size in enumerate(sizes)
        if size == sizes[-1] or (i + j + k) % 2 == 0
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "device", "batch", "draft_len"), whole_steps())
def test_whole_steps(shape, device, batch, draft_len):
    """All layers of the target and the draft model for the largest batch; else two and one, which are all equal."""
    layers = None if (batch, draft_len) == (16, 8) else (2, 1)
    try:
        assert_step(*compiled(shape, batch, draft_len, device, layers=layers), draft_len)
    finally:
        compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("shape", DENSE)
def test_whole_steps_with_an_int8_target(shape):
    try:
        assert_step(*compiled(shape, 8, 4, "H200", quantize="int8", cache_dtype="int8"), 4, share=0.04)
    finally:
        compiled.cache_clear()
