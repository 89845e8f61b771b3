"""Documents the fields of named tuples by the comments behind them."""

import importlib
import inspect
import re
from typing import Any


def describe_field(app: Any, kind: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Replaces the docstring that Python gives a field of a named tuple."""
    if not lines or not lines[0].startswith("Alias for field number"):
        return
    module, owner, field = name.rsplit(".", 2)
    source = inspect.getsource(getattr(importlib.import_module(module), owner))
    comment = re.search(rf"^    {field}: [^#\n]*# (.*)$", source, re.MULTILINE)
    lines[:] = [comment[1] if comment else ""]


def setup(app) -> dict[str, bool]:
    """Connects the function to autodoc."""
    app.connect("autodoc-process-docstring", describe_field)
    return {"parallel_read_safe": True}
