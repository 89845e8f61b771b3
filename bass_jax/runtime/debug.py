"""A mode that reports invalid values of a user's own parts, which are clipped otherwise."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import checkify

_state = {"is_on": False, "is_tracing": False}


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Reports invalid values of drafters, rules and policies as errors, instead of clipping them.

    .. code-block:: python

        with bass.debug_checks():
            bass.generate(pair, prompts, max_new_tokens=32)

    Inside the context, `bass_jax.generate`, `bass_jax.stream`, `bass_jax.prefill` and an `bass_jax.Engine` made there
    compile functions with `jax.experimental.checkify`. They are slower. Functions that a user jits are not changed. A
    call raises a `ValueError` that names the class, the method and the value:

    * more or fewer drafts than 0 to the wanted number, tokens outside the vocabulary, drafts of probability 0, and
      distributions that do not sum to 1;
    * more or fewer accepted tokens than 0 to the number of drafts, and a next token outside the vocabulary;
    * planned draft lengths outside the range of ``policy.lengths``.
    """
    before, _state["is_on"] = _state["is_on"], True
    try:
        yield
    finally:
        _state["is_on"] = before


def is_debugging() -> bool:
    """Returns whether functions are compiled with checks of values."""
    return _state["is_on"]


def debug_check(make: Callable[[], tuple[jax.Array, str, dict[str, Any]]]) -> None:
    """Checks values in a function that `with_checks` traces; elsewhere does nothing.

    Args:
        make: returns an array that has to be True everywhere, the message of the error, and the values that replace
            ``{name}`` in it.
    """
    if _state["is_tracing"]:
        is_valid, message, values = make()
        checkify.check(is_valid.all(), message, **values)


def with_checks(function: Callable) -> Callable:
    """Returns `function` for jit, so that its result is ``(error, result)`` and it contains the checks."""

    def traced(*arguments):
        before, _state["is_tracing"] = _state["is_tracing"], True
        try:
            return function(*arguments)
        finally:
            _state["is_tracing"] = before

    return checkify.checkify(traced, errors=checkify.user_checks)


def raising(compiled: Callable) -> Callable:
    """Returns a function that calls one of `with_checks` and raises its error as a `ValueError`."""

    def call(*arguments):
        error, result = compiled(*arguments)
        message = error.get()
        if message is not None:
            raise ValueError(message.removesuffix(" (`check` failed)"))
        return result

    return call
