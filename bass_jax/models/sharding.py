"""Places parameters on a mesh according to the logical axes that they were declared with."""

import dataclasses

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.models.flax_model import Model, abstract_params
from bass_jax.models.mesh import EXPERT_AXIS
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.parameters import LOGICAL_AXES
from bass_jax.runtime.names import expected_one_of
from bass_jax.typing import Params

TENSOR_PARALLEL = {"kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
"""Megatron's scheme: heads, MLPs and vocabulary are partitioned over the axis ``tp``, the residual stream is not."""


def default_rules(mesh: Mesh | None) -> dict[str, str]:
    """Returns `TENSOR_PARALLEL`, with the experts of a layer partitioned over the axis ``ep`` if `mesh` has it."""
    has_expert_axis = mesh is not None and EXPERT_AXIS in mesh.axis_names
    return TENSOR_PARALLEL | ({"experts": EXPERT_AXIS} if has_expert_axis else {})


def param_shardings(config: ModelConfig, mesh: Mesh, rules: dict[str, str] | None = None) -> Params:
    """Returns a `NamedSharding` per parameter.

    Args:
        config: of the model.
        mesh: the devices.
        rules: logical axis → mesh axis; other axes are replicated. `default_rules` by default.

    Raises:
        ValueError: if a rule names an unknown axis, or a tensor does not divide over its mesh axis.
    """
    rules = default_rules(mesh) if rules is None else rules
    for logical, axis in rules.items():
        if logical not in LOGICAL_AXES:
            raise ValueError(f"rules: unknown logical axis {logical!r}; {expected_one_of(logical, LOGICAL_AXES)}")
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


def placed_config(config: ModelConfig, mesh: Mesh | None, rules: dict[str, str] | None = None) -> ModelConfig:
    """Returns `config` with the mesh axes that its heads and its experts are partitioned over, None for none."""
    rules = {} if mesh is None else default_rules(mesh) if rules is None else rules
    expert_axes = rules.get("experts"), rules.get("mlp")
    return dataclasses.replace(config, tensor_axis=rules.get("kv_heads"), expert_axes=expert_axes)


def place_model(model: Model, mesh: Mesh, rules: dict[str, str] | None = None) -> Model:
    """Places a model that is in memory on a mesh.

    Args:
        model: a model on one device or on another mesh.
        mesh: the devices; see `bass_jax.models.tensor_parallel_mesh`.
        rules: see `param_shardings`; ``{}`` replicates the whole model.

    Raises:
        ValueError: as in `param_shardings`.
    """
    shardings = param_shardings(model.config, mesh, rules)
    output_ids = model.output_ids
    if output_ids is not None:
        output_ids = jax.device_put(output_ids, NamedSharding(mesh, PartitionSpec()))
    return Model(jax.device_put(model.params, shardings), placed_config(model.config, mesh, rules), output_ids)
