"""Checks of a caller's arguments: every mistake is a `ValueError` that names the argument, its value and what fits."""

import math
import operator
import reprlib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bass_jax.runtime.names import expected_one_of


def check_integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Returns `value` as an int.

    Raises:
        ValueError: if it is none (True and False are none), below `low` or above `high`.
    """
    try:
        if isinstance(value, bool | np.bool_) or np.ndim(value):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={shown(value)}: expected a whole number{_range(low, high)}") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name}={shown(value)}: expected a whole number{_range(low, high)}")
    return number


def check_number(name: str, value: Any, low: float | int | None = None, high: float | int | None = None) -> float:
    """Returns `value` as a float.

    Raises:
        ValueError: if it is none, not finite, below `low` or above `high`.
    """
    number = math.nan
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        number = float(value)
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name}={shown(value)}: expected a finite number{_range(low, high)}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """Returns `value` as a bool.

    Raises:
        ValueError: if it is neither True nor False.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={shown(value)}: expected True or False")
    return bool(value)


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises a `ValueError` if `value` is none of `choices`."""
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name}={shown(value)}: {expected_one_of(value, choices)}")


def check_kind(name: str, value: Any, kind: Any, expected: str = "") -> None:
    """Raises a `ValueError` if `value` is no instance of `kind`, a type or a union; `expected` says what fits."""
    if not isinstance(value, kind):
        kinds = typing.get_args(kind) or (kind,)
        expected = expected or " or ".join("None" if one is type(None) else one.__name__ for one in kinds)
        raise ValueError(f"{name}={shown(value)}: expected {expected}")


def check_pytree(name: str, value: Any) -> None:
    """Checks that JAX can take a user's object apart into arrays, so that it can be an argument of a jitted function.

    Raises:
        ValueError: if its class is not registered, or a leaf is no array.
    """
    kind = type(value).__name__
    leaves = jax.tree.leaves(value)
    how = "make it a frozen dataclass and decorate it with @jax.tree_util.register_dataclass"
    if len(leaves) == 1 and leaves[0] is value:
        raise ValueError(f"{name}={shown(value)}: {kind} is no pytree; {how}")
    for leaf in leaves:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int | jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name}: {kind} has a leaf of type {type(leaf).__name__}: expected arrays; declare other fields with "
                'dataclasses.field(metadata={"static": True})'
            )


def check_callable(name: str, value: Any) -> None:
    """Raises a `ValueError` if `value` is neither None nor a function."""
    if value is not None and not isinstance(value, Callable):
        raise ValueError(f"{name}={shown(value)}: expected a function or None")


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Returns one text or a sequence of them as a tuple.

    Raises:
        ValueError: if it holds anything but texts.
    """
    texts = (value,) if isinstance(value, str) else tuple(value) if _is_list(value) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}={shown(value)}: expected a text or a sequence of texts")
    return texts


def check_tokens(name: str, value: Any, vocab_size: int | None = None) -> np.ndarray:
    """Returns token ids as ``[n]`` int64; n may be 0.

    Raises:
        ValueError: if it is no sequence of whole numbers, or one lies outside the vocabulary.
    """
    try:
        if isinstance(value, str | bytes | Mapping | bool) or np.ndim(value) != 1:
            raise TypeError
        ids = np.asarray(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={shown(value)}: expected a sequence of token ids") from None
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name}={shown(value)}: expected a sequence of token ids")
    if ids.size and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        size = "expected ids of at least 0" if vocab_size is None else f"the vocabulary has {vocab_size} tokens"
        raise ValueError(f"{name} has token {wrong}: {size}")
    return ids.astype(np.int64)


def check_per_row(name: str, value: Any, num_rows: int | None = None) -> np.ndarray:
    """Returns one number for all rows or one per row: ``[]`` or ``[num_rows]``.

    Raises:
        ValueError: if it holds anything but numbers, or has another shape.
    """
    try:
        numbers = np.asarray(value)
    except ValueError:
        numbers = np.asarray(None)
    if not np.issubdtype(numbers.dtype, np.number) or np.iscomplexobj(numbers) or numbers.ndim > 1:
        raise ValueError(f"{name}={shown(value)}: expected a number, or one per row")
    if numbers.ndim and num_rows is not None and numbers.shape != (num_rows,):
        raise ValueError(f"{name} has {numbers.size} values: expected 1 or {num_rows}, one per row")
    return numbers


def check_sequence(name: str, value: Any, expected: str) -> None:
    """Raises a `ValueError` if `value` is no list, tuple or array with a first axis; `expected` says what fits."""
    is_sequence = isinstance(value, Sequence | np.ndarray | jax.Array) and not isinstance(value, str | bytes)
    if not is_sequence or getattr(value, "ndim", 1) == 0:
        raise ValueError(f"{name}={shown(value)}: expected {expected}")


def shown(value: Any) -> str:
    """Returns `value` as an error shows it: one line, not too long."""
    value = value.item() if isinstance(value, np.generic) else value
    return " ".join(reprlib.repr(value).split())


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) and getattr(value, "ndim", 1) > 0


def _range(low: Any, high: Any) -> str:
    if low is None:
        return "" if high is None else f" of at most {high}"
    return f" of at least {low}" if high is None else f" from {low} to {high}"
