"""The documentation has an entry for every public name, and every field of a configuration file is described."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import bass_jax
from bass_jax.experiments.experiment_config import ExperimentConfig
from bass_jax.experiments.traffic.traffic_config import TrafficConfig
from bass_jax.models.families import FAMILIES
from bass_jax.training import DistillConfig

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference" / "api"


def public_packages() -> list[str]:
    """Returns the names of all packages that declare public names."""
    found = ["kernels_pallas", "bass_jax"]
    for module in pkgutil.walk_packages(bass_jax.__path__, "bass_jax."):
        if module.ispkg and hasattr(importlib.import_module(module.name), "__all__"):
            found.append(module.name)
    return found


def has_docstring(module: str, name: str) -> bool:
    """Returns whether autodoc describes a name of a module: a constant of another file has no docstring there."""
    value = getattr(importlib.import_module(module), name)
    source = Path(importlib.import_module(module).__file__).read_text()
    return inspect.isclass(value) or callable(value) or bool(re.search(rf"^{name}\b.*=", source, re.MULTILINE))


def documented(page: str) -> dict[str, set[str]]:
    """Returns the names that a page's directives describe, by module."""
    found: dict[str, set[str]] = {}
    pattern = r"^\.\. (?:auto(\w+)|py:data):: ([\w.]+)\n((?:   :.*\n)*)"
    for kind, target, options in re.findall(pattern, page, re.MULTILINE):
        if kind != "module":
            module, _, name = target.rpartition(".")
            found.setdefault(module, set()).add(name)
        elif ":no-members:" not in options:
            excluded = re.search(r":exclude-members: (.*)", options)
            names = {name for name in importlib.import_module(target).__all__ if has_docstring(target, name)}
            found.setdefault(target, set()).update(names - set(excluded[1].split(", ") if excluded else ()))
    return found


ENTRIES = [documented(path.read_text()) for path in PAGES.glob("*.md")]


def entry(package: str, name: str) -> bool:
    """Returns whether the object of that name has an entry, under this package's name or another one's."""
    target = getattr(importlib.import_module(package), name)
    return any(
        getattr(importlib.import_module(module), other, None) is target
        for entries in ENTRIES
        for module, names in entries.items()
        for other in names
        if other == name
    )


@pytest.mark.parametrize("package", public_packages())
def test_every_public_name_has_an_entry(package):
    module = importlib.import_module(package)
    subpackages = {name for name in module.__all__ if f"{package}.{name}" in public_packages()}
    missing = [name for name in module.__all__ if name not in subpackages and not entry(package, name)]
    assert not missing


def test_a_name_is_described_only_once():
    names = [f"{module}.{name}" for entries in ENTRIES for module, found in entries.items() for name in found]
    assert len(names) == len(set(names))


def test_the_index_lists_every_page():
    listed = re.findall(r"^[a-z_]+$", (PAGES / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")


@pytest.mark.parametrize("kind", [ExperimentConfig, TrafficConfig, DistillConfig])
def test_every_field_of_a_configuration_is_described(kind, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "extensions")
    config_keys = importlib.import_module("config_keys")
    for path, section in config_keys.sections(kind):
        for name, kind_text, _, meaning in config_keys.rows(section):
            assert kind_text and meaning, f"{path}.{name}"


def test_the_table_of_families_has_three_random_models_of_every_new_family(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "extensions")
    rows = importlib.import_module("family_table").family_rows()
    assert [row[0].strip("`") for row in rows] == list(FAMILIES)
    # Models with vision are read as their text part, such as `gemma3_text`.
    fewer = ("ministral", "gpt_bigcode", "gemma", "gemma3", "llama4", "qwen3_5", "qwen3_5_moe")
    assert all(int(row[2]) >= (1 if row[0].strip("`") in fewer else 3) for row in rows)
    assert all(row[1].endswith(".") and int(row[3]) for row in rows)


def test_the_workflow_runs_targets_of_the_makefile():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(job["strategy"]["matrix"]["target"]) == {"lint", "types", "docs", "test"}
    assert {"lint", "types", "docs", "test"} <= set(targets)
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"


def links(path: Path) -> list[str]:
    """Returns the relative links of a page, without those in code blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [target for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in target]


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")], ids=lambda path: path.name
)
def test_links_lead_to_files(path):
    missing = [target for target in links(path) if not (path.parent / target).exists()]
    assert not missing
