"""Steps on an NVIDIA GPU. `make gpu-check` runs these tests; without a GPU they are skipped."""

import dataclasses

import jax
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.drafters import ModelDrafter, NgramDrafter
from kernels_pallas.graph_capture import ONE_GRAPH_OPTIONS, compile_with_thunks, is_one_graph
from tests.flat_config import flat_config

pytestmark = pytest.mark.gpu

# The kernels support a head size of 64 and capacities of whole blocks.
CONFIG = flat_config(
    vocab_size=512, width=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, mlp_width=512, context=1024
)
PROMPTS = [list(range(1, 1 + length)) for length in (1, 7, 64, 200)]


def pair(attention: str, drafter: str) -> bass.Pair:
    target = bass.models.init_model(CONFIG, jax.random.key(0))
    target = dataclasses.replace(target, config=dataclasses.replace(CONFIG, attention_implementation=attention))
    draft = bass.models.init_model(dataclasses.replace(target.config, layers=CONFIG.layers[:1]), jax.random.key(1))
    return bass.Pair(target, ModelDrafter(draft, CONFIG.vocab_size) if drafter == "model" else NgramDrafter())


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("attention", ["ragged", "pad", "split", "xla"])
def test_greedy_speculation_equals_regular_decoding(attention, drafter):
    """In float32 with exact products, because TF32 rounds passes over five tokens and over one differently."""
    with jax.default_matmul_precision("highest"):
        made = pair(attention, drafter)
        runs = [
            bass.generate(made, PROMPTS, bass.SpecConfig(draft_len=4), max_new_tokens=64, step=step)
            for step in ("speculate", "decode")
        ]
    for speculated, decoded in zip(*(run.tokens for run in runs), strict=True):
        np.testing.assert_array_equal(speculated, decoded)


def test_a_step_is_one_cuda_graph_that_can_be_replayed():
    """The driver records the graph of the compiled step once, and replays it until all rows are done."""
    with jax.default_matmul_precision("highest"):
        made, spec = pair("ragged", "model"), bass.SpecConfig(draft_len=4, acceptance="greedy")
        expected = bass.generate(made, PROMPTS, spec, max_new_tokens=32, step="decode")
        state = bass.prefill(made, PROMPTS, spec, max_new_tokens=32)
        step = jax.jit(lambda pair, state: bass.speculate_step(pair, state, spec), donate_argnums=1)
        compiled, thunks = compile_with_thunks(step.lower(made, state), compiler_options=ONE_GRAPH_OPTIONS)
    assert is_one_graph(thunks), thunks
    while not state.done.all():
        state, _ = compiled(made, state)
    for row, tokens in enumerate(expected.tokens):
        np.testing.assert_array_equal(bass.output_tokens(state, row), tokens)


def test_the_device_loop_equals_the_host_loop_in_two_runs():
    """There was a bug where a loop captured in a CUDA graph was correct only in its first run."""
    made, spec = pair("ragged", "model"), bass.SpecConfig(draft_len=4, acceptance="greedy")
    host = bass.generate(made, PROMPTS, spec, max_new_tokens=32)
    for _ in range(2):
        state = bass.prefill(made, PROMPTS, spec, max_new_tokens=32)
        state, _ = bass.decoding.generate_on_device(made, state, spec, max_steps=32)
        for row, expected in enumerate(host.tokens):
            np.testing.assert_array_equal(bass.output_tokens(state, row), expected)
