"""`JitCache` compiles a function once per structure and shapes of its arguments, and counts that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bass_jax.models import tensor_parallel_mesh
from bass_jax.runtime import jit_cache
from bass_jax.runtime.jit_cache import JitCache


def double(x):
    return {"twice": 2 * x}


def add(x, y):
    return x + y


def test_each_shape_and_dtype_is_compiled_once():
    cache, x = JitCache(), jnp.arange(3.0)
    function = cache.get(double, x)
    np.testing.assert_array_equal(function(x)["twice"], [0, 2, 4])
    assert cache.num_compiled == 1 and cache.compile_seconds > 0
    seconds = cache.compile_seconds
    assert cache.get(double, x + 1) is function
    assert cache.get(double, jax.ShapeDtypeStruct((3,), jnp.float32)) is function
    assert (cache.num_compiled, cache.compile_seconds) == (1, seconds)
    cache.get(double, jnp.arange(4.0))
    cache.get(double, jnp.arange(3))
    assert cache.num_compiled == 3


def test_functions_structures_and_donation_are_distinguished():
    cache, x = JitCache(), jnp.arange(3.0)
    cache.get(add, x, x)
    cache.get(jnp.add, x, x)
    cache.get(add, x, x, donate_argnums=(0,))
    assert cache.num_compiled == 3
    cache.get(jax.tree.leaves, (x, x))
    cache.get(jax.tree.leaves, [x, x])
    assert cache.num_compiled == 5


def test_placements_on_a_mesh_are_distinguished():
    cache, x, mesh = JitCache(), jnp.arange(4.0), tensor_parallel_mesh(2)
    found = []
    for spec in (PartitionSpec(), PartitionSpec("tp")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        function = cache.get(double, placed)
        assert cache.get(double, placed) is function
        found.append(function)
        np.testing.assert_array_equal(function(placed)["twice"], [0, 2, 4, 6])
    assert found[0] is not found[1] and cache.num_compiled == 2


def test_a_donated_argument_is_deleted():
    cache, x, y = JitCache(), jnp.arange(3.0), jnp.ones(3)
    cache.get(add, x, y, donate_argnums=(0,))(x, y)
    assert x.is_deleted() and not y.is_deleted()


@pytest.mark.parametrize("prepare", [False, True])
def test_the_call_that_prepares_a_function_donates_a_copy(prepare):
    calls = []

    def counted(x):
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    x = jnp.ones(3)
    function = JitCache().get(counted, x, donate_argnums=(0,), prepare=prepare)
    jax.effects_barrier()
    assert len(calls) == int(prepare) and not x.is_deleted()
    np.testing.assert_array_equal(function(x), 2.0)
    assert x.is_deleted()


def test_a_cleared_cache_compiles_again():
    cache, x = JitCache(), jnp.arange(3.0)
    cache.get(double, x)
    cache.clear()
    cache.get(double, x)
    assert cache.num_compiled == 2


def test_the_functions_used_least_recently_are_dropped(monkeypatch):
    monkeypatch.setattr(jit_cache, "MAX_COMPILED", 3)
    monkeypatch.setattr(jit_cache, "MAX_MEMORY_MAPS", 10**9)  # Other tests of this process have many.
    cache, (a, b, c, d) = JitCache(), (jnp.zeros(num) for num in (1, 2, 3, 4))
    for x in (a, b, c, a, d):
        cache.get(double, x)
    assert [cache.find(double, x) is not None for x in (a, b, c, d)] == [True, False, True, True]


def test_functions_are_dropped_when_memory_maps_run_out(monkeypatch):
    monkeypatch.setattr(jit_cache, "MAX_MEMORY_MAPS", 10**9)
    cache = JitCache()
    for num in range(1, 9):
        cache.get(double, jnp.zeros(num))
    monkeypatch.setattr(jit_cache, "MAX_MEMORY_MAPS", 1)
    cache.get(double, jnp.zeros(9))
    assert [cache.find(double, jnp.zeros(num)) is not None for num in range(1, 10)] == [False] * 4 + [True] * 5


@pytest.mark.slow
def test_400_shapes_in_one_process(monkeypatch):
    """Dropped functions free their memory maps, which jax's own caches would keep."""
    start = jit_cache.num_memory_maps()
    if start == 0:
        pytest.skip("this system does not tell the number of memory maps")
    monkeypatch.setattr(jit_cache, "MAX_MEMORY_MAPS", start + 200)
    cache, most = JitCache(), 0
    for num in range(1, 401):
        x = np.ones(num, np.float32)
        np.testing.assert_array_equal(cache.get(double, x)(x)["twice"], 2.0)
        most = max(most, jit_cache.num_memory_maps())
    assert cache.num_compiled == 400 and most < start + 400


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failed_compilation_raises_and_is_tried_again(in_background, monkeypatch):
    cache, x = JitCache(), jnp.arange(3.0)
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.get(double, x, in_background=in_background)(x)
    assert cache.num_compiled == 0
    np.testing.assert_array_equal(cache.get(double, x)(x)["twice"], [0, 2, 4])


@pytest.mark.parametrize("is_disabled", [False, True])
def test_the_optimization_level_yields_to_the_option_of_jax(is_disabled, monkeypatch):
    name, options = "jax_disable_most_optimizations", {}
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda _, compiler_options: options.update(compiler_options))
    before = jax.config.read(name)
    jax.config.update(name, is_disabled)
    try:
        JitCache().get(double, jnp.arange(3.0))
    finally:
        jax.config.update(name, before)
    assert ("xla_backend_optimization_level" in options) != is_disabled
