"""A whole step compiled for an H200 without one: donated caches stay in place, nothing of their size is copied."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import bass_jax as bass
from bass_jax.drafters import ModelDrafter, NgramDrafter
from bass_jax.sampling import SamplingControls
from bass_jax.state import SpecState
from tests.gpu_compile import compile_for, needs_gpu_compiler

BATCH, CAPACITY, LAYERS = 8, 2048, 4

# Layers shaped like those of a 7.8B model; few of them, because every layer compiles alike.
TARGET = bass.ModelConfig(
    vocab_size=32000, width=4096, num_layers=LAYERS, num_heads=32, num_kv_heads=8, head_dim=128, mlp_width=11008,
    context=8192, is_tied=False, dtype="bfloat16",
)  # fmt: skip
DRAFT = dataclasses.replace(TARGET, width=2048, num_layers=2, num_heads=16, mlp_width=5504)


def abstract_pair(drafter: str) -> bass.Pair:
    target = jax.eval_shape(lambda: bass.init_model(TARGET, jax.random.key(0)))
    if drafter == "ngram":
        return bass.Pair(target, NgramDrafter())
    draft = jax.eval_shape(lambda: bass.init_model(DRAFT, jax.random.key(0)))
    return bass.Pair(target, ModelDrafter(draft, TARGET.vocab_size))


def abstract_state(pair: bass.Pair) -> SpecState:
    def build(pair):
        def per_row(dtype):
            return jnp.zeros(BATCH, dtype)

        tokens, lengths = jnp.zeros((BATCH, CAPACITY), jnp.int32), per_row(jnp.int32)
        return SpecState(
            tokens=tokens, lengths=lengths, prompt_lengths=lengths, limits=lengths, finish=lengths,
            keys=jax.vmap(jax.random.key)(per_row(jnp.uint32)), num_steps=lengths, draft_lens=lengths,
            controls=SamplingControls(
                per_row(jnp.float32), per_row(jnp.int32), per_row(jnp.float32), per_row(jnp.float32)
            ),
            stop_tokens=jnp.zeros((BATCH, 2), jnp.int32),
            target_cache=pair.target.init_cache(BATCH, CAPACITY),
            drafter=pair.drafter.init(tokens, lengths),
        )  # fmt: skip

    return jax.eval_shape(build, pair)


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if leaf.dtype != "key<fry>")


@needs_gpu_compiler
@pytest.mark.parametrize(("step", "drafter"), [("speculate", "model"), ("speculate", "ngram"), ("decode", "ngram")])
def test_donated_caches_are_updated_in_place(step, drafter):
    """Broken by a layout that attention transposes, a scan that returns its cache, or a missing donation."""
    pair = abstract_pair(drafter)
    state = abstract_state(pair)
    function = {"speculate": bass.speculate_step, "decode": bass.decode_step}[step]
    spec = bass.SpecConfig(draft_len=4, acceptance="greedy")
    compiled = compile_for(lambda pair, state: function(pair, state, spec), pair, state, donate_argnums=1)

    memory = compiled.memory_analysis()
    caches = num_bytes(state.target_cache) + (0 if state.drafter is None else num_bytes(state.drafter.cache))
    assert memory.alias_size_in_bytes >= caches
    one_layer = num_bytes(state.target_cache.keys[0])
    assert memory.temp_size_in_bytes < one_layer * 2, f"{memory.temp_size_in_bytes} bytes of temporaries"

    shape = ",".join(map(str, state.target_cache.keys[0].shape))
    copies = re.findall(rf"bf16\[{shape}\][^=]*? (?:copy|transpose)\(", compiled.as_text())
    assert not copies, copies[:3]
