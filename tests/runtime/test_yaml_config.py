"""`read_yaml` reads dataclasses from YAML files that can extend other files."""

import dataclasses
from collections.abc import Mapping

import pytest

from bass_jax.runtime.yaml_config import read_yaml


@dataclasses.dataclass(frozen=True)
class Section:
    first: int = 0
    second: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str
    section: Section = Section()
    free: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    sections: Mapping[str, Section]
    section: Section = Section()


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_sections_are_merged_and_other_values_are_replaced(write):
    write("base.yaml", "name: base\nsection: {first: 1, second: [1, 2]}\nfree: {a: 1}")
    write("deep/middle.yaml", "extends: ../base.yaml\nname: middle\nsection: {second: [3]}")
    path = write("own.yaml", "extends: deep/middle.yaml\nfree: {b: 2}")
    expected = Settings("middle", Section(1, (3,)), {"a": 1, "b": 2})
    assert read_yaml(Settings, path) == expected
    changed = dataclasses.replace(expected, section=Section(7, (3,)))
    assert read_yaml(Settings, path, {"section.first": 7}) == changed


@pytest.mark.parametrize(
    "text, message",
    [
        ("extends: own.yaml", r"own\.yaml: extends itself"),
        ("extends: other.yaml", r"own\.yaml: extends itself"),
        ("extends: [a]", "extends: expected the path of another file"),
        ("extends: absent.yaml", r"absent\.yaml: not readable"),
        ("extends: list.yaml", r"list\.yaml: expected a mapping"),
    ],
)
def test_a_wrong_extends_is_an_error_that_names_the_file(write, text, message):
    write("other.yaml", "extends: own.yaml")
    write("list.yaml", "- 1")
    with pytest.raises(ValueError, match=message):
        read_yaml(Settings, write("own.yaml", text))


@pytest.mark.parametrize(
    "text, key",
    [
        ("name: a\nname: b", "name"),
        ("name: a\nsection: {first: 1, second: [1], first: 2}", "first"),
        ("name: a\nfree:\n  x: 1\n  y: 2\n  x: 3", "x"),
    ],
)
def test_a_duplicate_key_is_refused(write, text, key):
    with pytest.raises(ValueError, match=rf"own\.yaml: not readable as YAML: key '{key}' comes twice.* line"):
        read_yaml(Settings, write("own.yaml", text))


def test_a_merge_key_is_not_a_duplicate(write):
    path = write("own.yaml", "name: a\nsection: &one {first: 1}\nfree: {<<: {x: 1}, x: 2}")
    assert read_yaml(Settings, path).free == {"x": 2}


def test_an_override_cannot_add_an_entry_to_a_mapping(write):
    """A misspelled name in an override must not create a new entry."""
    path = write("own.yaml", "name: a\nsections: {one: {first: 1}}")
    changed = read_yaml(Named, path, {"sections.one.first": 2, "section.first": 3})
    assert (changed.sections["one"].first, changed.section.first) == (2, 3)
    with pytest.raises(ValueError, match=r"sections\.two\.first: no 'two': expected one of 'one'"):
        read_yaml(Named, path, {"sections.two.first": 2})
