"""A whole step compiled for an H200 without one: caches stay in place, one CUDA graph, few kernels per layer."""

import functools
import re
from collections import Counter
from typing import NamedTuple

import jax
import pytest

import bass_jax as bass
from bass_jax.decoding.state import SpecState
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS, Thunk, is_one_graph
from tests.abstract import abstract_pair, abstract_state, num_bytes, of_depth
from tests.flat_config import flat_config
from tests.gpu_compile import compile_with_thunks_for, needs_gpu_compiler

BATCH, CAPACITY, LAYERS = 8, 2048, 4

# Shaped like a 7.8B model. Layers compile alike: most tests compile few of them and take a layer's kernels from the
# difference of two depths; a slow one compiles all 32.
SHAPE = {
    "vocab_size": 32000,
    "context": 8192,
    "num_kv_heads": 8,
    "head_dim": 128,
    "is_tied": False,
    "dtype": "bfloat16",
}
TARGET = flat_config(width=4096, num_layers=LAYERS, num_heads=32, mlp_width=11008, **SHAPE)
DRAFT = flat_config(width=2048, num_layers=2, num_heads=16, mlp_width=5504, **SHAPE)
KERNELS_PER_LAYER, KERNELS_PER_DRAFT_LAYER = 12, 14
STEPS = {"speculate": bass.speculate_step, "decode": bass.decode_step}


class Compiled(NamedTuple):
    state: SpecState
    executable: jax.stages.Compiled
    thunks: list[Thunk]

    @property
    def num_kernels(self) -> int:
        return sum(thunk.kind != "kCopy" for thunk in self.thunks)


@functools.cache
def compiled(step: str, drafter: str, num_layers: int = LAYERS, num_draft_layers: int = 2) -> Compiled:
    draft = None if drafter == "ngram" else of_depth(DRAFT, num_draft_layers)
    pair = abstract_pair(of_depth(TARGET, num_layers), draft)
    state = abstract_state(pair, BATCH, CAPACITY)
    spec = bass.SpecConfig(draft_len=4, acceptance="token")
    executable, thunks = compile_with_thunks_for(
        lambda pair, state: STEPS[step](pair, state, spec), pair, state,
        compiler_options=ONE_GRAPH_OPTIONS, donate_argnums=1,
    )  # fmt: skip
    return Compiled(state, executable, thunks)


KINDS = [("speculate", "model"), ("speculate", "ngram"), ("decode", "ngram")]


@needs_gpu_compiler
@pytest.mark.parametrize(("step", "drafter"), KINDS)
def test_donated_caches_are_updated_in_place(step, drafter):
    """Broken by a layout that attention transposes, a scan that returns its cache, or a missing donation."""
    state, executable, _ = compiled(step, drafter)
    memory = executable.memory_analysis()
    caches = num_bytes(state.target_cache) + (0 if state.drafter is None else num_bytes(state.drafter.cache))
    assert memory.alias_size_in_bytes >= caches
    one_layer = num_bytes(state.target_cache.keys[0])
    assert memory.temp_size_in_bytes < one_layer * 2, f"{memory.temp_size_in_bytes} bytes of temporaries"

    shape = ",".join(map(str, state.target_cache.keys[0].shape))
    copies = re.findall(rf"bf16\[{shape}\][^=]*? (?:copy|transpose)\(", executable.as_text())
    assert not copies, copies[:3]


@needs_gpu_compiler
@pytest.mark.parametrize(("step", "drafter"), KINDS)
def test_step_is_one_graph_without_a_sort(step, drafter):
    """The drafting loop included; attention and acceptance run in the package's kernels."""
    _, executable, thunks = compiled(step, drafter)
    assert is_one_graph(thunks), Counter(thunk.graph for thunk in thunks)
    text = executable.as_text()
    assert " sort(" not in text
    # Attention of every layer of the target, and the three launches of acceptance.
    assert text.count('custom_call_target="mosaic_gpu') >= LAYERS + 3


@needs_gpu_compiler
def test_a_layer_is_few_kernels():
    """Copies of counters aside. Plain XLA makes about 18 of a layer."""
    shallow, deep = compiled("speculate", "ngram"), compiled("speculate", "ngram", LAYERS + 1)
    assert 0 < deep.num_kernels - shallow.num_kernels <= KERNELS_PER_LAYER


@needs_gpu_compiler
@pytest.mark.slow
def test_the_whole_7b_step_is_one_graph():
    """32 layers with a draft of 4, which a step launches three times: to catch up, first, and in the loop.

    Of a narrower layer XLA keeps the residual's addition apart from the sum of squares: two kernels more.
    """
    _, executable, thunks = found = compiled("speculate", "model", 32, 4)
    assert is_one_graph(thunks)
    assert " sort(" not in executable.as_text()
    shallow = compiled("speculate", "model", LAYERS, 2)
    added = KERNELS_PER_LAYER * (32 - LAYERS) + 3 * KERNELS_PER_DRAFT_LAYER * (4 - 2)
    # One for what several layers share and one layer has inside a kernel of its own, in each of four passes.
    assert found.num_kernels - shallow.num_kernels <= added + 4
