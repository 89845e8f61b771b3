"""A pure function and its parameters as a model: plain JAX, Equinox, and the base of the other adapters."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from bass_jax.models.decoder import ForwardOutput
from bass_jax.models.protocol import Cache
from bass_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionModel:
    """A `bass_jax.models.TargetModel` made of functions. The attributes are the arguments of `from_function`."""

    params: Any
    apply: Callable = dataclasses.field(metadata={"static": True})
    make_cache: Callable = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    context: int | None = dataclasses.field(default=None, metadata={"static": True})

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache."""
        return self.make_cache(batch, capacity)

    def forward(self, tokens: Array, positions: Array, cache: Cache, *, hidden_layers: tuple[int, ...] = ()) -> Any:
        """Runs the function, which returns a `ForwardOutput`; `hidden_layers` is passed on if it is not empty.

        Raises:
            ValueError: for `hidden_layers` if the function does not take them.
        """
        if hidden_layers:
            parameters = inspect.signature(self.apply).parameters.values()
            if not any(one.name == "hidden_layers" or one.kind is one.VAR_KEYWORD for one in parameters):
                raise ValueError(f"hidden_layers={hidden_layers}: the model's function has no such parameter")
        options = {"hidden_layers": hidden_layers} if hidden_layers else {}
        output = self.apply(self.params, tokens, positions, cache, **options)
        is_pair = isinstance(output, tuple) and not isinstance(output, ForwardOutput) and len(output) == 2
        return ForwardOutput(*output) if is_pair else output


def from_function(
    forward: Callable, params: Any, *, init_cache: Callable, vocab_size: int, context: int | None = None
) -> FunctionModel:
    """Makes a model of a pure function. Arguments and cache are those of `bass_jax.models.TargetModel.forward`.

    Args:
        forward: ``(params, tokens [B, T], positions [B, T], cache) -> (logits [B, T, V], cache)``. It may also return a
            `ForwardOutput`, and take the keyword `hidden_layers`. Pass the same function object again for new
            parameters, because functions are compared by identity.
        params: a pytree of arrays. Of an Equinox module these are ``eqx.partition(module, eqx.is_array)[0]``.
        init_cache: ``(batch, capacity) -> cache``.
        vocab_size: V.
        context: the largest number of tokens of a row; None for no limit.
    """
    return FunctionModel(params, forward, init_cache, vocab_size, context)
