"""Error messages about unknown names; imports no library, because the command line uses it before it imports jax."""

import difflib
from collections.abc import Iterable
from typing import Any


def expected_one_of(value: Any, choices: Iterable[Any], also: str = "") -> str:
    """Returns the part of an error message that lists the valid names, and the one that is nearest to `value`.

    Args:
        value: the wrong name.
        choices: the valid names, in the order in which they are listed.
        also: what else is valid, such as ``"a path"``.
    """
    names = list(choices)
    listed = ", ".join(map(repr, names)) + (f" or {also}" if also else "")
    return f"expected one of {listed}{nearest(value, names)}"


def nearest(value: Any, choices: Iterable[Any]) -> str:
    """Returns ``"; did you mean 'name'?"`` for the name that is most similar to `value`, or ``""`` if none is."""
    found = difflib.get_close_matches(str(value).lower(), [str(name) for name in choices], n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
