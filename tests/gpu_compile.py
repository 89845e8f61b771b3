"""Compiles a function for an NVIDIA GPU on a machine that has none.

XLA's CUDA plug-in only needs a description of the device. A test can check that the code lowers, that it fits the
GPU's registers and shared memory, and how large the temporaries in `memory_analysis()` are. It cannot check speed or
numerics.

It needs jax's CUDA plug-in and PJRT packages in jax's version, and `ptxas` (`nvidia-cuda-nvcc` with `nvidia-nvvm`, or
an installed CUDA toolkit).
"""

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from kernels_pallas.graph_capture import Thunk, compile_with_thunks


class Gpu(NamedTuple):
    """The properties of a GPU that XLA compiles for; sizes in bytes, bandwidth in bytes per second."""

    name: str
    compute_capability: tuple[int, int]
    feature_extension: str
    num_cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    memory_bandwidth: int
    l2_cache_size: int
    clock_rate_ghz: float
    device_memory_size: int

    def target_config(self) -> str:
        """Returns the text form of XLA's `GpuTargetConfigProto`.

        Without the versions of driver, runtime and toolkit, XLA keeps loops and library calls out of CUDA graphs.
        """
        major, minor = self.compute_capability
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {self.feature_extension} }}
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  core_count: {self.num_cores}  fpus_per_core: {self.fpus_per_core}  clock_rate_ghz: {self.clock_rate_ghz}
  memory_bandwidth: {self.memory_bandwidth}  l2_cache_size: {self.l2_cache_size}
  device_memory_size: {self.device_memory_size}
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


H200 = Gpu(
    name="NVIDIA H200",
    compute_capability=(9, 0),
    feature_extension="ACCELERATED_FEATURES",
    num_cores=132,
    fpus_per_core=128,
    shared_memory_per_core=233_472,
    shared_memory_per_block_optin=232_448,
    memory_bandwidth=4_800_000_000_000,
    l2_cache_size=52_428_800,
    clock_rate_ghz=1.98,
    device_memory_size=151_397_597_184,
)
A100 = Gpu(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    feature_extension="NONE",
    num_cores=108,
    fpus_per_core=64,
    shared_memory_per_core=167_936,
    shared_memory_per_block_optin=166_912,
    memory_bandwidth=2_039_040_000_000,
    l2_cache_size=41_943_040,
    clock_rate_ghz=1.41,
    device_memory_size=85_100_068_864,
)
B200 = H200._replace(
    name="NVIDIA B200",
    compute_capability=(10, 0),
    num_cores=148,
    memory_bandwidth=8_000_000_000_000,
    l2_cache_size=132_644_864,
    device_memory_size=191_000_000_000,
)
COMPILER_OPTIONS = {
    "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
    # The tests for CPUs compile without most optimizations, see conftest.py.
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
"""XLA's options for a GPU: register spills are errors, and optimizations are on."""

GPUS = {"H200": H200, "A100": A100, "B200": B200}
"""The GPUs that the project compiles for, by the name that `compile_for` takes."""


def why_not() -> str | None:
    """Returns the reason why this installation cannot compile for a GPU, or None if it can."""
    if jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        # jax would start the plug-in as a device, and fail because there is none.
        return "JAX_PLATFORMS is not cpu"
    wanted = importlib.metadata.version("jax")
    for package in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed (extra gpu-compile)"
        if found != wanted:
            return f"{package} is {found}; jax is {wanted}"
    return None


needs_gpu_compiler = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
"""Skips a test that calls `compile_for` if this installation cannot."""


@functools.cache
def _mesh(device: str, num_devices: int = 1) -> jax.sharding.Mesh:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[device].target_config(), topology=f"1x1x{num_devices}"
    )
    return topologies.make_mesh(topo=topology, mesh_shape=(num_devices,), axis_names=("tp",))


def compile_for(
    function: Callable[..., Any],
    *args: Any,
    device: str = "H200",
    compiler_options: dict[str, Any] | None = None,
    **jit_options: Any,
) -> jax.stages.Compiled:
    """Compiles `function` for `device` to machine code; a register spill is an error.

    Args:
        function: a pure function, not jitted.
        *args: its arguments: pytrees of arrays, scalars or `jax.ShapeDtypeStruct`s.
        device: a key of `GPUS`.
        compiler_options: further options of XLA, by flag name without the dashes.
        **jit_options: passed to `jax.jit`, such as `donate_argnums`.

    Returns:
        The compiled function. Its `memory_analysis()` contains the temporary and the aliased (donated) bytes, and
        `as_text()` the optimized HLO.
    """
    lowered = _lower(function, args, device, jit_options)
    with jax.set_mesh(_mesh(device)):
        return lowered.compile(compiler_options={**COMPILER_OPTIONS, **(compiler_options or {})})


def thunks_for(function: Callable[..., Any], *args: Any, **options: Any) -> list[Thunk]:
    """Returns the thunks of `compile_with_thunks_for`."""
    return compile_with_thunks_for(function, *args, **options)[1]


def compile_with_thunks_for(
    function: Callable[..., Any],
    *args: Any,
    device: str = "H200",
    compiler_options: dict[str, Any] | None = None,
    num_devices: int = 1,
    place: Callable[[jax.sharding.Mesh], Any] | None = None,
    **jit_options: Any,
) -> tuple[jax.stages.Compiled, list[Thunk]]:
    """Compiles as `compile_for` does, and reads all launches and the CUDA graph that contains each.

    Args:
        function: a pure function, not jitted.
        *args: its arguments, as for `compile_for`.
        device: a key of `GPUS`.
        compiler_options: further options of XLA, by flag name without the dashes.
        num_devices: devices of the mesh, whose axis is called `"tp"`.
        place: returns the sharding of every array of `args` on a mesh; default replicated.
        **jit_options: passed to `jax.jit`.

    Returns:
        The compiled function, and the thunks of one device in order.
    """
    lowered = _lower(function, args, device, jit_options, num_devices, place)
    with jax.set_mesh(_mesh(device, num_devices)):
        return compile_with_thunks(lowered, compiler_options={**COMPILER_OPTIONS, **(compiler_options or {})})


def _lower(function, args, device, jit_options, num_devices=1, place=None) -> jax.stages.Lowered:
    mesh = _mesh(device, num_devices)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def spec(leaf, sharding):
        leaf = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(jnp.asarray(leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    specs = jax.tree.map(spec, args, jax.tree.map(lambda _: replicated, args) if place is None else place(mesh))
    with jax.set_mesh(mesh):
        return jax.jit(function, **jit_options).trace(*specs).lower(lowering_platforms=("cuda",))


def lower_for(function: Callable[..., Any], *args: Any, device: str = "H200") -> jax.stages.Lowered:
    """Lowers `function` for CUDA, which needs no plug-in. It fails if a kernel has no lowering.

    Args:
        function: a pure function, not jitted.
        *args: its arguments, as for `compile_for`.
        device: a key of `GPUS`; kernels may choose tiles by it.
    """
    abstract_device = jax.sharding.AbstractDevice(
        device_kind=GPUS[device].name, num_cores=GPUS[device].num_cores, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=abstract_device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
