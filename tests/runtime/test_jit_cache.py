"""Compiled functions: once per shapes, here or beside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.decoding.prefill import begin_reading, lay_out_prompts
from bass_jax.drafters import ModelDrafter, NgramDrafter
from bass_jax.runtime.jit_cache import JitCache
from tests import tiny


def double(x):
    return {"twice": 2 * x}


def test_what_was_begun_from_shapes_serves_arrays():
    executables = JitCache()
    results = executables.begin(double, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert results == {"twice": jax.ShapeDtypeStruct((3,), jnp.float32)}
    function = executables.get(double, x := jnp.arange(3.0))
    np.testing.assert_array_equal(function(x)["twice"], [0, 2, 4])
    assert executables.num_compiled == 1 and executables.compile_seconds > 0
    spent = executables.compile_seconds
    assert executables.get(double, x) is function and executables.begin(double, x) == results
    assert (executables.num_compiled, executables.compile_seconds) == (1, spent)
    executables.begin(double, y := jnp.arange(4.0))
    assert executables.num_compiled == 1  # counted where somebody gets it
    executables.get(double, y)
    assert executables.num_compiled == 2
    executables.clear()
    executables.get(double, x)
    assert executables.num_compiled == 3


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_failed_compilation_is_told_and_tried_again(monkeypatch, is_begun):
    executables, x = JitCache(), jnp.arange(3.0)
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: 1 / 0)
    if is_begun:
        executables.begin(double, x)
    with pytest.raises(ZeroDivisionError):
        executables.get(double, x)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    np.testing.assert_array_equal(executables.get(double, x)(x)["twice"], [0, 2, 4])


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("has_network", [False, True])
def test_the_state_told_ahead_has_the_shapes_of_the_one_that_comes(has_network, num_samples):
    """Else what was compiled for it would serve nobody, and cost double."""
    target = tiny.model(1, num_layers=1)
    drafter = ModelDrafter(tiny.model(2, num_layers=1), target.config.vocab_size) if has_network else NgramDrafter()
    pair, options = bass.Pair(target, drafter), {"max_new_tokens": 4, "num_samples": num_samples}
    ahead = begin_reading(pair, lay_out_prompts(pair, tiny.PROMPTS, bass.SpecConfig(2), **options))
    state = bass.prefill(pair, tiny.PROMPTS, bass.SpecConfig(2), **options)
    assert jax.tree.structure(ahead) == jax.tree.structure(state)
    assert jax.tree.map(jax.typeof, ahead) == jax.tree.map(jax.typeof, state)
