"""Parameters of which some take their minutes elsewhere."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], is_quick: Callable[[Any], bool]) -> list:
    """All values; those that are not quick are left to `make test-slow`. Tuples are several parameters."""
    return [
        value
        if is_quick(value)
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
