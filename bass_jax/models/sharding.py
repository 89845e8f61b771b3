"""Places parameters on a mesh from the logical axes that the tensors were declared with."""

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.config import ModelConfig
from bass_jax.models.model import abstract_params
from bass_jax.models.tensors import LOGICAL_AXES
from bass_jax.typing import Params

TENSOR_PARALLEL = {"kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
"""Megatron's scheme: heads, mlp and vocabulary split over the axis ``tp``, the residual stream whole."""


def param_shardings(config: ModelConfig, mesh: Mesh, rules: dict[str, str] | None = None) -> Params:
    """Returns a `NamedSharding` per parameter.

    Args:
        config: of the model.
        mesh: the devices.
        rules: logical axis → mesh axis; axes left out are replicated. Default `TENSOR_PARALLEL`.

    Raises:
        ValueError: if a rule names an unknown axis, or a tensor does not divide over its mesh axis.
    """
    rules = TENSOR_PARALLEL if rules is None else rules
    for logical, axis in rules.items():
        if logical not in LOGICAL_AXES:
            raise ValueError(f"rules: unknown logical axis {logical!r}; expected one of {LOGICAL_AXES}")
        if axis not in mesh.axis_names:
            raise ValueError(f"rules: mesh has no axis {axis!r}; it has {mesh.axis_names}")

    def place(path, boxed):
        spec = PartitionSpec(*(rules.get(name) if name else None for name in boxed.names))
        for name, size in zip(boxed.names, boxed.value.shape, strict=True):
            axis = rules.get(name) if name else None
            if axis is not None and size % mesh.shape[axis]:
                tensor = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"{tensor}: axis {name!r} of size {size} does not divide over "
                    f"{mesh.shape[axis]} devices of mesh axis {axis!r}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        place, abstract_params(config), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
