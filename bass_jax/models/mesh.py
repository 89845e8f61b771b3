"""Meshes of several devices, and the placement of arrays that are replicated on them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bass_jax.models.kv_cache import KVCache

AXIS = "tp"
"""The mesh axis that `bass_jax.models.sharding.TENSOR_PARALLEL` partitions heads, MLPs and vocabulary over."""

EXPERT_AXIS = "ep"
"""The mesh axis that the experts of a layer are partitioned over by default."""


def tensor_parallel_mesh(
    num_devices: int | None = None, *, expert_parallel: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Returns a mesh for `bass_jax.load_pair` and `bass_jax.decoding.random_pair`.

    Its axis is ``"tp"``. With `expert_parallel` it has the axes ``"ep"`` and ``"tp"``: the experts of a layer are
    partitioned over ``"ep"``, and the width of each over ``"tp"``. Everything else is replicated over ``"ep"``.

    Args:
        num_devices: use the first so many devices; all by default.
        expert_parallel: size of the axis ``"ep"``, a divisor of the number of devices; 1 for a mesh without it.
        devices: the devices to choose from; by default those of all processes.

    Raises:
        ValueError: if there are fewer devices, or `expert_parallel` does not divide their number.
    """
    devices = list(jax.devices() if devices is None else devices)
    wanted = len(devices) if num_devices is None else num_devices
    if not 1 <= wanted <= len(devices):
        raise ValueError(f"num_devices={num_devices}: expected 1 to {len(devices)}, the devices that there are")
    if expert_parallel == 1:
        return Mesh(np.array(devices[:wanted]), (AXIS,), axis_types=(AxisType.Auto,))
    if expert_parallel < 1 or wanted % expert_parallel:
        raise ValueError(f"expert_parallel={expert_parallel}: expected a divisor of the number of devices, {wanted}")
    grid = np.array(devices[:wanted]).reshape(expert_parallel, -1)
    return Mesh(grid, (EXPERT_AXIS, AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def start_distributed(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Mesh:
    """Connects the processes of a run and returns the mesh of all their devices.

    Call it before anything uses a device. Every process runs the same program on the same prompts; each holds its part
    of the weights, and all hold the tokens.

    Args:
        coordinator: ``"host:port"`` of process 0. By default JAX asks the cluster (Slurm, Open MPI).
        num_processes: number of processes of the run; likewise.
        process_id: index of this process, from 0; likewise.

    Raises:
        ValueError: if only some of the three are given.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(f"{missing[0]}=None: expected all of {', '.join(given)}, or none where a cluster says them")
    jax.distributed.initialize(coordinator, num_processes, process_id)
    return tensor_parallel_mesh()


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh that arrays of `tree` are placed on, or None if each is on one device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return sharding.mesh  # pyright: ignore[reportReturnType]
    return None


def has_axis(axis: str | None) -> bool:
    """Returns whether a mesh of several devices is set and has `axis`, which is not None."""
    return axis is not None and _has_mesh() and axis in jax.sharding.get_abstract_mesh().axis_names


def replicate_on_mesh(tree: Any) -> Any:
    """Constrains arrays to be replicated on the mesh that is set, except caches; without a mesh returns `tree`."""
    if not _has_mesh():
        return tree

    def keep(leaf):
        return leaf if isinstance(leaf, KVCache) else jax.lax.with_sharding_constraint(leaf, PartitionSpec())

    return jax.tree.map(keep, tree, is_leaf=lambda node: isinstance(node, KVCache))


def split_heads(cache: KVCache, axis: str | None) -> KVCache:
    """Partitions the heads of a cache over a mesh axis, if a mesh that has the axis is set.

    A single head, that of latent attention, is replicated.
    """
    if not has_axis(axis):
        return cache

    def split(leaf):
        spec = PartitionSpec(None, axis) if leaf.shape[1] > 1 else PartitionSpec()
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree.map(split, cache)


def place_whole(tree: Any, mesh: Mesh | None) -> Any:
    """Places arrays on the default device, or replicated on `mesh`; on a mesh, caches are not moved."""
    if mesh is None:
        return jax.device_put(tree)
    whole = NamedSharding(mesh, PartitionSpec())

    def put(leaf):
        if isinstance(leaf, KVCache):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            # JAX cannot place keys on the devices of several processes, only numbers.
            data = jax.device_put(np.asarray(jax.random.key_data(leaf)), whole)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return leaf if getattr(leaf, "sharding", None) == whole else jax.device_put(leaf, whole)

    return jax.tree.map(put, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _has_mesh() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1
