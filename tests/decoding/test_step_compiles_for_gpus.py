"""A whole step compiled for an H200: caches are updated in place, and it is one CUDA graph with few kernels."""

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
from tests.marks import mostly_slow

BATCH, CAPACITY, LAYERS, DRAFT_LAYERS = 8, 2048, 2, 1

# The shape of a 7.8B model. Most tests compile few layers. The number of kernels per layer is the difference of two
# depths, and a slow test compiles all 32 layers.
SHAPE = {
    "vocab_size": 32000,
    "context": 8192,
    "num_kv_heads": 8,
    "head_dim": 128,
    "is_tied": False,
    "dtype": "bfloat16",
}
TARGET = flat_config(width=4096, num_layers=32, num_heads=32, mlp_width=11008, **SHAPE)
DRAFT = flat_config(width=2048, num_layers=4, num_heads=16, mlp_width=5504, **SHAPE)
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
def compiled(step: str, drafter: str, num_layers: int = LAYERS, num_draft_layers: int = DRAFT_LAYERS) -> Compiled:
    draft = None if drafter == "ngram" else of_depth(DRAFT, num_draft_layers)
    pair = abstract_pair(of_depth(TARGET, num_layers), draft)
    state = abstract_state(pair, BATCH, CAPACITY)
    spec = bass.SpecConfig(draft_len=4, acceptance="token")

    def run(pair, state):
        return STEPS[step](pair, state, spec)

    executable, thunks = compile_with_thunks_for(run, pair, state, compiler_options=ONE_GRAPH_OPTIONS, donate_argnums=1)
    return Compiled(state, executable, thunks)


KINDS = mostly_slow(
    [("speculate", "model"), ("speculate", "ngram"), ("decode", "ngram")], lambda kind: kind[0] == "decode"
)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(("step", "drafter"), KINDS)
def test_donated_caches_are_updated_in_place(step, drafter):
    """Fails if attention transposes the cache, if a scan returns it, or if it is not donated."""
    state, executable, _ = compiled(step, drafter)
    memory = executable.memory_analysis()
    caches = num_bytes(state.target_cache) + (
        0 if state.drafter_state is None else num_bytes(state.drafter_state.cache)
    )
    assert memory.alias_size_in_bytes >= caches
    one_layer = num_bytes(state.target_cache.keys[0])
    assert memory.temp_size_in_bytes < one_layer * 2, f"{memory.temp_size_in_bytes} bytes of temporaries"

    shape = ",".join(map(str, state.target_cache.keys[0].shape))
    copies = re.findall(rf"bf16\[{shape}\][^=]*? (?:copy|transpose)\(", executable.as_text())
    assert not copies, copies[:3]


@needs_gpu_compiler
@pytest.mark.parametrize(("step", "drafter"), KINDS)
def test_a_step_is_one_graph_with_our_kernels_and_without_a_sort(step, drafter):
    """Including the drafting loop. Attention and acceptance run in the package's kernels."""
    _, executable, thunks = compiled(step, drafter)
    assert is_one_graph(thunks), Counter(thunk.graph for thunk in thunks)
    text = executable.as_text()
    assert " sort(" not in text
    assert "ragged_attention" in text and "acceptance_draw_token" in text
    assert text.count('custom_call_target="mosaic_gpu') >= LAYERS, "attention of every layer of the target"
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3, "the three launches of acceptance"


@needs_gpu_compiler
@pytest.mark.slow
def test_a_layer_is_few_kernels():
    """Without copies of counters. XLA alone needs about 18 kernels per layer."""
    # Of a model of two layers XLA fuses one kernel more.
    shallow, deep = (compiled("speculate", "ngram", LAYERS + more) for more in (1, 2))
    assert 0 < deep.num_kernels - shallow.num_kernels <= KERNELS_PER_LAYER


@needs_gpu_compiler
@pytest.mark.slow
def test_the_whole_7b_step_is_one_graph():
    """32 layers, and a draft model of 4 layers that runs three times: to catch up, for the first draft, in the loop.

    In a narrower layer XLA does not fuse the residual addition with the sum of squares: two kernels more.
    """
    _, executable, thunks = found = compiled("speculate", "model", 32, 4)
    assert is_one_graph(thunks)
    assert " sort(" not in executable.as_text()
    shallow = compiled("speculate", "model", 4, 2)
    added = KERNELS_PER_LAYER * (32 - 4) + 3 * KERNELS_PER_DRAFT_LAYER * (4 - 2)
    # In each of four passes, one kernel more for what several layers share.
    assert found.num_kernels - shallow.num_kernels <= added + 4
