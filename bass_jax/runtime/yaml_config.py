"""A YAML file as a frozen dataclass, checked to the last key."""

import dataclasses
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from bass_jax.runtime.bundled import find_bundled
from bass_jax.runtime.names import expected_one_of, nearest


def forbid_extra(*kinds: type) -> None:
    """Makes an unknown key of these dataclasses an error when a file is read."""
    for kind in kinds:
        kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]


def read_yaml[T](kind: type[T], path: str | Path, overrides: Mapping[str, Any] | None = None) -> T:
    """Reads a file.

    With ``extends: OTHER`` at its top the file says only what differs from another one, found relative to it: sections
    are merged, everything else is replaced.

    Args:
        kind: dataclass of the file's content.
        path: of the YAML file; see `bass_jax.runtime.bundled.find_bundled`.
        overrides: dotted path to value, such as ``{"training.num_steps": 10}``.

    Raises:
        ValueError: one line naming the file and the dotted path of what is wrong.
    """
    content = _read(find_bundled(path), ())
    for dotted, value in (overrides or {}).items():
        _override(kind, content, dotted, value)
    return parse_yaml(kind, content, str(path))


def _override(kind: Any, content: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets one key; a section that is a dataclass can be missing, an entry of a mapping of them cannot."""
    *parents, last = dotted.split(".")
    place = content
    for parent in parents:
        entry = _entry_of(kind)
        if entry is not None and parent not in place:
            raise ValueError(f"{dotted}: no {parent!r}: {expected_one_of(parent, sorted(place))}")
        kind = _field_of(kind, parent) if entry is None else entry
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ValueError(f"{dotted}: {parent} is not a section")
    place[last] = value


def _field_of(kind: Any, name: str) -> Any:
    """Returns the type of a dataclass's field; None if it has none, which is an error later."""
    return typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None


def _entry_of(kind: Any) -> Any:
    """Returns the dataclass that a mapping's values are; None for any other type."""
    if typing.get_origin(kind) not in (dict, Mapping):
        return None
    value = typing.get_args(kind)[1]
    return value if dataclasses.is_dataclass(value) else None


class _UniqueKeys(yaml.SafeLoader):
    """Reads YAML, in which a key that comes twice is an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} comes twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    """Reads a file over those that it extends."""
    if path.resolve() in extending:
        raise ValueError(f"{path}: extends itself")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping")
    if (base := content.pop("extends", None)) is None:
        return content
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends: expected the path of another file")
    return _merged(_read(path.parent / base, (*extending, path.resolve())), content)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in own.items()
    }
    return base | both


def parse_yaml[T](kind: type[T], content: Mapping[str, Any], name: str) -> T:
    """Checks a parsed file; see `read_yaml`."""
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        dotted = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "unexpected_keyword_argument":
            message = f"unknown key{nearest(first['loc'][-1], _keys_of(kind, first['loc'][:-1]))}"
        raise ValueError(f"{name}: {dotted}: {message}" if dotted else f"{name}: {message}") from None


def _keys_of(kind: Any, path: Sequence[Any]) -> list[str]:
    """Returns the keys of the section at `path`."""
    for name in path:
        kind = _entry_of(kind) or _field_of(kind, str(name))
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def as_plain(settings: Any) -> Any:
    """Returns a dataclass as what YAML and JSON can write: dictionaries, lists, numbers and text."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return {field.name: as_plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    if isinstance(settings, Mapping):
        return {key: as_plain(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [as_plain(value) for value in settings]
    return settings
