"""The check of annotations that every test runs with."""

from collections.abc import Callable

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function: Callable) -> Callable:
    """Returns the function with checks of its arguments and its result.

    A function inside of another one is defined again in every call, and making its checks takes a millisecond or more.
    Therefore it is checked only if it is annotated with an array.
    """
    hints = function.__annotations__.values()
    if "<locals>" in function.__qualname__ and not any(_is_array(hint) for hint in hints):
        return function
    return beartype(function)


def _is_array(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)
