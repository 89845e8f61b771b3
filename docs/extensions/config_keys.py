"""The keys of a configuration file, read from its dataclass. Imports no Sphinx, so that tests need none."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from bass_jax.runtime.yaml_config import as_plain


def meanings(kind: type) -> dict[str, str]:
    """Returns the meaning of each field, from the section ``Attributes`` of the docstring."""
    _, _, section = inspect.getdoc(kind).partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def nested(annotation: Any) -> type | None:
    """Returns the dataclass that the values of a field are, alone or in a collection; None if there is none."""
    if dataclasses.is_dataclass(annotation):
        return annotation
    found = (nested(argument) for argument in typing.get_args(annotation))
    return next((kind for kind in found if kind is not None), None)


def type_text(annotation: Any) -> str:
    """Returns a type as a reader of YAML knows it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, typing.TypeAliasType):
        return type_text(annotation.__value__)
    if dataclasses.is_dataclass(annotation):
        return "section"
    if origin is typing.Literal:
        return ", ".join(repr(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(argument) for argument in arguments))
    if origin in (tuple, list):
        if Ellipsis in arguments:
            return f"list of {type_text(arguments[0])}"
        return f"list of {len(arguments)}: {', '.join(map(type_text, arguments))}"
    if origin in (dict, Mapping) and arguments:
        return f"mapping of {type_text(arguments[0])} to {type_text(arguments[1])}"
    if annotation is types.NoneType:
        return "null"
    return {str: "text", bool: "true or false", int: "integer", float: "number", Any: "any"}.get(annotation, "mapping")


def default_text(field: dataclasses.Field) -> str:
    """Returns the default of a field; it is empty for a section, whose own fields have defaults."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if default is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(default):
        return ""
    text = yaml.safe_dump(as_plain(default), default_flow_style=True, width=1000)
    return f"``{text.removesuffix('...' + chr(10)).strip()}``"


def sections(kind: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yields the dataclass of a file and those of its sections, each with its dotted path."""
    yield path, kind
    for name, annotation in typing.get_type_hints(kind).items():
        if (inner := nested(annotation)) is not None:
            origin = typing.get_origin(annotation)
            place = f"{path}.{name}".removeprefix(".")
            yield from sections(inner, place + {dict: ".NAME", Mapping: ".NAME", tuple: "[]"}.get(origin, ""))


def rows(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """Yields name, type, default and meaning of each field.

    Raises:
        ValueError: if the docstring does not describe a field.
    """
    described, annotations = meanings(kind), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in described:
            raise ValueError(f"{kind.__name__}.{field.name} is missing in the section Attributes of the docstring")
        yield field.name, type_text(annotations[field.name]), default_text(field), described[field.name]
