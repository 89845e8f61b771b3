"""Finds the parts that a configuration, a command line or an argument names: ``"module:attribute"``, with arguments."""

import ast
import importlib
import importlib.util
import os
import sys
from typing import Any, NamedTuple


class PartName(NamedTuple):
    """The parts of ``"name(1, key=2)"``."""

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    is_called: bool


def parse_part(text: str, argument: str, example: str) -> PartName:
    """Splits a name from its arguments, which are Python literals.

    Args:
        text: ``"name"`` or ``"name(1, key=2)"``.
        argument: what the caller calls it, for the error message.
        example: likewise.

    Raises:
        ValueError: if the arguments are no literals.
    """
    name, bracket, rest = text.partition("(")
    if not bracket:
        return PartName(text, (), {}, False)
    try:
        call: Any = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return PartName(name, tuple(ast.literal_eval(value) for value in call.args), keywords, True)
    except (SyntaxError, ValueError):
        raise ValueError(f"{argument}={text!r}: expected arguments as in {example!r}") from None


def import_part(text: str, argument: str, kind: Any, **offered: Any) -> Any:
    """Returns the object that ``"module:attribute"`` or ``"module:attribute(1, key=2)"`` names.

    A class, and an attribute that is no instance of `kind`, is called: it makes the object.

    Args:
        text: the name. A module can also be the path of a file, as in ``"parts/mine.py:Bigram"``.
        argument: what the caller calls it, for the error message.
        kind: what the object has to be, a type that `isinstance` takes.
        offered: further keyword arguments, for a function or class that has parameters of these names.

    Raises:
        ValueError: if there is no such attribute, or calling it fails because of its arguments.
    """
    part = parse_part(text, argument, "module:name(size=4)")
    found = import_attribute(part.name, argument)
    is_object = isinstance(found, kind) and not isinstance(found, type)
    if callable(found) and (part.is_called or not is_object):
        return call_part(found, part, f"{argument}={text!r}", **offered)
    if part.is_called:
        raise ValueError(f"{argument}={text!r}: expected no arguments, because it is no function")
    return found


def call_part(make: Any, part: PartName, described: str, **offered: Any) -> Any:
    """Calls a function or class that makes a part.

    Args:
        make: the function.
        part: holds its arguments.
        described: precedes the error message.
        offered: further keyword arguments, for a function that has parameters of these names.

    Raises:
        ValueError: if it does not take the arguments.
    """
    import inspect

    try:
        signature = inspect.signature(make)
        keywords = {name: value for name, value in offered.items() if name in signature.parameters} | part.keywords
        signature.bind(*part.arguments, **keywords)
    except TypeError as error:
        raise ValueError(f"{described}: {error}") from None
    return make(*part.arguments, **keywords)


def import_attribute(name: str, argument: str) -> Any:
    """Imports the attribute that `name` refers to.

    Modules in the current directory are found too, as with ``python -m``. The script ``bass-jax`` does not have that
    directory on its path.

    Args:
        name: ``"module:attribute"``, or ``"path/to/file.py:attribute"``.
        argument: what the caller calls it, for the error message.

    Raises:
        ValueError: if there is no such module or attribute.
    """
    module, separator, attribute = name.rpartition(":")
    if not separator:
        raise ValueError(f"{argument}={name!r}: expected 'module:attribute'")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(_import_file(module) if module.endswith(".py") else importlib.import_module(module), attribute)
    except (ImportError, OSError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{argument}={name!r}: {error}") from None


def _import_file(path: str) -> Any:
    """Imports a file once per process."""
    name = f"bass_jax_part_{os.path.abspath(path)}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a path that ends with .py has a loader"
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
