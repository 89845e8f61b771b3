"""Flax NNX modules as models."""

import dataclasses
from collections.abc import Callable
from typing import Any

from bass_jax.models.adapters.function import FunctionModel


@dataclasses.dataclass(frozen=True)
class Structure:
    """The graph definition of an NNX module, hashed by the module's class, because its values may have no hash."""

    module_class: type
    graphdef: Any = dataclasses.field(hash=False)

    def merge(self, state: Any) -> Any:
        """Returns the module with the arrays of `state`."""
        from flax import nnx

        return nnx.merge(self.graphdef, state)


@dataclasses.dataclass(frozen=True)
class _Call:
    structure: Structure
    call: Callable

    def __call__(self, state: Any, *arguments: Any, **options: Any) -> Any:
        return self.call(self.structure.merge(state), *arguments, **options)


def split_module(module: Any) -> tuple[Structure, Any]:
    """Returns the structure of an NNX module, static, and its state as a nested dict of arrays."""
    from flax import nnx

    graphdef, state = nnx.split(module)
    return Structure(type(module), graphdef), nnx.to_pure_dict(state)


def from_flax_nnx(
    module: Any, *, vocab_size: int, call: Callable | None = None, init_cache: Callable, context: int | None = None
) -> FunctionModel:
    """Makes a model of an NNX module. Later changes of `module` have no effect on the model.

    Args:
        module: an ``nnx.Module``.
        vocab_size: V.
        call: ``(module, tokens, positions, cache) -> (logits, cache)``; default ``module(tokens, positions, cache)``.
        init_cache: ``(batch, capacity) -> cache``.
        context: the largest number of tokens of a row; None for no limit.
    """
    structure, state = split_module(module)
    return FunctionModel(state, _Call(structure, call or type(module).__call__), init_cache, vocab_size, context)
