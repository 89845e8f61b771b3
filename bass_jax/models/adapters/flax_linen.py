"""Flax Linen modules as models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from bass_jax.models.adapters.function import FunctionModel
from bass_jax.models.protocol import Cache


@dataclasses.dataclass(frozen=True)
class _Apply:
    """Calls a module; equal modules are equal functions."""

    module: nn.Module
    method: Any

    def __call__(self, variables: Any, *arguments: Any, **options: Any) -> Any:
        return self.module.apply(variables, *arguments, method=self.method, **options)


def from_flax_linen(
    module: nn.Module,
    variables: Any,
    *,
    init_cache: Callable[[int, int], Cache],
    vocab_size: int,
    method: Any = None,
    context: int | None = None,
) -> FunctionModel:
    """Makes a model of a Linen module whose cache is an argument and a result, not a variable collection.

    Args:
        module: hashable, as Linen modules with plain attributes are.
        variables: as ``module.init`` returns them; with boxed logical axes, pass ``nn.meta.unbox(variables)``.
        init_cache: ``(batch, capacity) -> cache``.
        vocab_size: V.
        method: of the module, ``(tokens, positions, cache) -> (logits, cache)``; default ``__call__``.
        context: the largest number of tokens of a row; None for no limit.
    """
    return FunctionModel(variables, _Apply(module, method), init_cache, vocab_size, context)
