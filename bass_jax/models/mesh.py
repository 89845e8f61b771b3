"""Several devices: the mesh that a model is spread over, and what lies whole on all of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bass_jax.models.kv_cache import KVCache

AXIS = "tp"
"""Name of the mesh axis that `bass_jax.models.sharding.TENSOR_PARALLEL` splits heads, mlp and vocabulary over."""


def tensor_parallel_mesh(num_devices: int | None = None, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh of one axis, ``"tp"``, for `bass_jax.load_pair` and `bass_jax.random_pair`.

    Args:
        num_devices: the first so many; default all.
        devices: to take from; default those of all processes.

    Raises:
        ValueError: if there are fewer.
    """
    devices = list(jax.devices() if devices is None else devices)
    wanted = len(devices) if num_devices is None else num_devices
    if not 1 <= wanted <= len(devices):
        raise ValueError(f"num_devices={num_devices}: expected 1 to {len(devices)}, the devices that there are")
    return Mesh(np.array(devices[:wanted]), (AXIS,), axis_types=(AxisType.Auto,))


def start_distributed(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Mesh:
    """Joins the processes of a run and returns the mesh of all their devices; call it before anything uses a device.

    Every process runs the same program on the same prompts: each holds its part of the weights, all hold the tokens.

    Args:
        coordinator: ``"host:port"`` of process 0. Default what the cluster says, where jax knows it (Slurm, Open MPI).
        num_processes: of the run; likewise.
        process_id: of this process, from 0; likewise.

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
    """Returns the mesh that arrays of `tree` lie on, or None if each lies on one device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return sharding.mesh  # pyright: ignore[reportReturnType]
    return None


def has_axis(axis: str | None) -> bool:
    """Whether a mesh of several devices is set that has `axis`, which is not None."""
    return axis is not None and _is_spread() and axis in jax.sharding.get_abstract_mesh().axis_names


def replicate(tree: Any) -> Any:
    """Keeps arrays whole on every device of the mesh that is set; caches stay as they are. Without a mesh, `tree`."""
    if not _is_spread():
        return tree

    def keep(leaf):
        return leaf if isinstance(leaf, KVCache) else jax.lax.with_sharding_constraint(leaf, PartitionSpec())

    return jax.tree.map(keep, tree, is_leaf=lambda node: isinstance(node, KVCache))


def split_heads(cache: KVCache, axis: str | None) -> KVCache:
    """Splits a cache's heads over a mesh axis, where a mesh that has it is set."""
    if not has_axis(axis):
        return cache
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, PartitionSpec(None, axis)), cache)


def place_whole(tree: Any, mesh: Mesh | None) -> Any:
    """Puts arrays on the default device, or whole on every device of `mesh`; caches stay where they are."""
    if mesh is None:
        return jax.device_put(tree)
    whole = NamedSharding(mesh, PartitionSpec())

    def put(leaf):
        if isinstance(leaf, KVCache):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            # Of several processes each has the keys; jax passes plain numbers alone to all devices.
            data = jax.device_put(np.asarray(jax.random.key_data(leaf)), whole)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return leaf if getattr(leaf, "sharding", None) == whole else jax.device_put(leaf, whole)

    return jax.tree.map(put, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _is_spread() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1
