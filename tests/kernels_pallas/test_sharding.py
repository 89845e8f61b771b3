"""Heads on a mesh axis: each device runs the kernel on its own kv heads, with simulated devices in a subprocess."""

import os
import pathlib
import subprocess
import sys

import pytest

# The number of devices is fixed when jax starts, so this cannot run in the tests' own process.
PROGRAM = """
import sys, warnings
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from kernels_pallas import masked_acceptance, ragged_attention, reference
from kernels_pallas.arg_specs import AcceptanceSpec, AttentionSpec, acceptance_arguments, attention_arguments

warnings.simplefilter("error")
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
options = {"implementation": sys.argv[1], "interpret": True}

# The Mosaic GPU kernel multiplies 16-bit floats.
dtype, error = ("bfloat16", 0.02) if sys.argv[1] == "mosaic_gpu" else ("float32", 1e-5)
arguments = attention_arguments(AttentionSpec("sharded", 2, 3, 8, 4, 64, 64, dtype))
cache, row = P(None, "tp"), P()
specs = {"q": P(None, None, "tp"), "k_cache": cache, "v_cache": cache, "lengths": row, "num_queries": row}
run = jax.shard_map(
    lambda arguments: ragged_attention(**arguments, **options),
    mesh=mesh, in_specs=(specs,), out_specs=P(None, None, "tp"), check_vma=False)
out = jax.jit(run)(arguments)
assert out.sharding.spec == P(None, None, "tp"), out.sharding
np.testing.assert_allclose(out.astype("float32"), reference.ragged_attention(**arguments), atol=error)

rows = acceptance_arguments(AcceptanceSpec("sharded", 4, 3, 128))
run = jax.shard_map(
    lambda arguments: masked_acceptance(**arguments, **options),
    mesh=mesh, in_specs=(P("tp"),), out_specs=P("tp"), check_vma=False)
out, expected = jax.jit(run)(rows), reference.masked_acceptance(**rows)
np.testing.assert_array_equal(out.num_accepted, expected.num_accepted)
np.testing.assert_array_equal(out.next_token, expected.next_token)
"""
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("implementation", ["xla", "triton", "mosaic_gpu"])
def test_heads_on_a_mesh_axis(implementation):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, implementation],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
