"""Places the arrays of a training on one device or on a mesh with the axes ``data`` and ``tp``."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.models import Model
from bass_jax.models.sharding import param_shardings
from bass_jax.training.distill_config import TrainingConfig
from bass_jax.training.init_draft import Draft
from bass_jax.typing import Params


def training_mesh(options: TrainingConfig) -> Mesh | None:
    """Returns a mesh of the first devices, or None for one device.

    Raises:
        ValueError: if there are fewer devices.
    """
    shape = (options.data_shards, options.param_shards)
    count, available = shape[0] * shape[1], len(jax.devices())
    if count > available:
        raise ValueError(
            f"data_shards={shape[0]}, param_shards={shape[1]}: expected at most {available} devices in all"
        )
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), ("data", "tp")) if count > 1 else None


def place_params(params: Params, draft: Draft, mesh: Mesh | None) -> Params:
    """Splits attention heads, MLP and vocabulary; a head or an adapter is copied to every device.

    Raises:
        ValueError: if a parameter cannot be split evenly.
    """
    if mesh is None:
        return params
    if not isinstance(draft, Model):
        return place(params, mesh)
    shardings = param_shardings(draft.config, mesh)
    return {name: jax.device_put(leaf, shardings[name]) for name, leaf in params.items()}


def place[T](tree: T, mesh: Mesh | None, *axes: str) -> T:
    """Splits the first dimensions of every array over the mesh axes `axes`; without any, copies it to every device."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))
