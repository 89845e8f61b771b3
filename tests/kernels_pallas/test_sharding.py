"""Heads on a mesh axis: each device runs the kernel on its own kv heads."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas import masked_acceptance, ragged_attention
from kernels_pallas.arg_specs import AcceptanceSpec, AttentionSpec
from tests.gpu_compile import H200

# Runs in a process of its own, because the number of devices is fixed when jax starts.
PROGRAM = """
import sys, warnings
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from kernels_pallas import masked_acceptance, ragged_attention, reference
from kernels_pallas.arg_specs import AcceptanceSpec, AttentionSpec, acceptance_arguments, attention_arguments

warnings.simplefilter("error")
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
options = {"implementation": sys.argv[1], "interpret": True}

arguments = attention_arguments(AttentionSpec("sharded", 2, 3, 8, 4, 64, 64, "float32"))
cache, row = P(None, "tp"), P()
specs = {"q": P(None, None, "tp"), "k_cache": cache, "v_cache": cache, "lengths": row, "num_queries": row}
run = jax.shard_map(
    lambda arguments: ragged_attention(**arguments, **options),
    mesh=mesh, in_specs=(specs,), out_specs=P(None, None, "tp"), check_vma=False)
out = jax.jit(run)(arguments)
assert out.sharding.spec == P(None, None, "tp"), out.sharding
np.testing.assert_allclose(out, reference.ragged_attention(**arguments), atol=1e-5)

rows = acceptance_arguments(AcceptanceSpec("sharded", 4, 3, 128))
run = jax.shard_map(
    lambda arguments: masked_acceptance(**arguments, **options),
    mesh=mesh, in_specs=(P("tp"),), out_specs=P("tp"), check_vma=False)
out, expected = jax.jit(run)(rows), reference.masked_acceptance(**rows)
np.testing.assert_array_equal(out.num_accepted, expected.num_accepted)
np.testing.assert_array_equal(out.next_token, expected.next_token)
"""
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "triton"])
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


def test_mosaic_gpu_lowers_on_a_mesh_axis():
    """Lowered only, because jax 0.12.0.1's interpreter of the dialect reports barriers of other devices as leaks."""
    device = jax.sharding.AbstractDevice(device_kind=H200.name, num_cores=H200.num_cores, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)

    def lower(op, in_specs, out_specs, arguments):
        run = jax.shard_map(
            lambda arguments: op(**arguments, implementation="mosaic_gpu"),
            mesh=mesh,
            in_specs=(in_specs,),
            out_specs=out_specs,
            check_vma=False,
        )
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.jit(run).trace(arguments).lower(lowering_platforms=("cuda",)).as_text()

    cache, row = P(None, "tp"), P()
    specs = {"q": P(None, None, "tp"), "k_cache": cache, "v_cache": cache, "lengths": row, "num_queries": row}
    shapes = AttentionSpec("sharded", 2, 3, 8, 4, 64, 64).shapes()
    text = lower(ragged_attention, specs, P(None, None, "tp"), shapes)
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    # Each device has 2 of the 4 kv heads.
    assert len(calls) == 1 and "tensor<2x2x64x64xbf16>" in calls[0]

    text = lower(masked_acceptance, P("tp"), P("tp"), AcceptanceSpec("sharded", 4, 3, 128).shapes())
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    # Each device has 2 of the 4 rows.
    assert len(calls) == 3 and all("tensor<2x4x128xf32>" in call for call in calls)
