"""Set-up of every test: the device, checked annotations, the `gpu` marker."""

import gc
import os
import sys
from pathlib import Path

import jaxtyping
import pytest

# Before anything imports jax. Four CPU devices, so that meshes can be tested anywhere.
if "--gpu" not in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # What is compiled is counted, and nothing is left in the user's cache.
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

jaxtyping.install_import_hook("bass_jax", "beartype.beartype")
# Tracing makes objects by the million and hardly any garbage.
gc.set_threshold(100_000, 20, 20)

MANY_MAPS = 30_000


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run on the NVIDIA GPU, the tests marked gpu included")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--gpu"):
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run pytest --gpu where there is one")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def compiled_code_is_bounded():
    """Forgets compiled functions when there are many.

    XLA's CPU code for one step takes 400 memory maps, and a process that reaches Linux's limit of 65,530 dies inside
    the compiler.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        import jax

        from bass_jax.runtime.jit_cache import JIT_CACHE

        JIT_CACHE.clear()
        jax.clear_caches()
        gc.collect()
