"""Builds parameters from a checkpoint's tensors, one tensor at a time."""

from collections.abc import Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.config import ModelConfig
from bass_jax.models import abstract_params
from bass_jax.models.families import FAMILIES
from bass_jax.typing import Params


class TensorSource(Protocol):
    """A checkpoint under Hugging Face's tensor names."""

    path: Any
    config: dict[str, Any]

    def names(self) -> Iterable[str]:
        """All tensor names."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        ...


def assemble(source: TensorSource, config: ModelConfig, shardings: Params | None = None) -> Params:
    """Reads every tensor of `config`'s family from `source` into our layout.

    Args:
        source: the checkpoint.
        config: of the model; its `dtype` is what the parameters are cast to.
        shardings: a sharding per parameter; default the default device.

    Raises:
        ValueError: naming file and tensor, if one is missing, extra or misshapen.
    """
    rules = FAMILIES[config.family].rules(config)
    present, wanted = set(source.names()), {name for rule in rules.values() for name in rule.sources}
    if missing := sorted(wanted - present):
        raise ValueError(f"{source.path}: missing tensor {missing[0]!r} ({len(missing)} missing)")
    if extra := sorted(present - wanted):
        raise ValueError(f"{source.path}: unexpected tensor {extra[0]!r} ({len(extra)} unexpected)")
    dtype = jnp.dtype(config.dtype)

    def build(path, boxed):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rule = rules[name]
        tensors = [source.read(part) for part in rule.sources]
        try:
            array = rule.build(*tensors)
        except ValueError as error:
            shapes = ", ".join(f"{part} {tensor.shape}" for part, tensor in zip(rule.sources, tensors))
            raise ValueError(f"{source.path}: cannot build {name!r} from {shapes}: {error}") from None
        if array.shape != boxed.value.shape:
            raise ValueError(
                f"{source.path}: tensor {rule.sources[0]!r} gives {name!r} the shape {array.shape}; "
                f"expected {boxed.value.shape}"
            )
        sharding = None if shardings is None else _leaf(shardings, path)
        return jax.device_put(np.ascontiguousarray(array).astype(dtype), sharding)

    return jax.tree_util.tree_map_with_path(
        build, abstract_params(config), is_leaf=lambda leaf: hasattr(leaf, "names")
    )


def _leaf(tree: Params, path) -> Any:
    for key in path:
        tree = tree[key.key]
    return tree
