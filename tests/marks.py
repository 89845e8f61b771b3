"""Parameters of a test of which some are marked `slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], is_quick: Callable[[Any], bool]) -> list:
    """Returns all values; those that are not quick are marked `slow`. A tuple holds several parameters."""
    return [
        value
        if is_quick(value)
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
