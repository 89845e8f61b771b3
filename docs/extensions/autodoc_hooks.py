"""Changes of what autodoc writes: the fields of named tuples, and classes with the name of a function."""

import importlib
import inspect
import re
from typing import Any

from sphinx.domains.python import PyObject


def describe_field(app: Any, kind: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Replaces the docstring that Python gives a field of a named tuple."""
    if not lines or not lines[0].startswith("Alias for field number"):
        return
    module, owner, field = name.rsplit(".", 2)
    source = inspect.getsource(getattr(importlib.import_module(module), owner))
    comment = re.search(rf"^    {field}: [^#\n]*# (.*)$", source, re.MULTILINE)
    lines[:] = [comment[1] if comment else ""]


def drop_return_type(
    app: Any, kind: str, name: str, member: Any, options: Any, signature: str, returns: str
) -> tuple[str, None] | None:
    """Removes the return type of ``__init__`` from a class that is described as a function."""
    return (signature, None) if kind == "function" and inspect.isclass(member) else None


def setup(app) -> dict[str, bool]:
    """Connects the functions to autodoc, and names the list of attributes by the heading in the docstrings."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-docstring", describe_field)
    app.connect("autodoc-process-signature", drop_return_type)
    return {"parallel_read_safe": True}
