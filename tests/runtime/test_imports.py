"""`import_attribute` finds ``"module:attribute"`` in installed modules and in the current directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from bass_jax.runtime.imports import import_attribute

SCRIPT = """#!{python}
import sys
sys.path.insert(1, {root!r})
from bass_jax.runtime.imports import import_attribute
print(import_attribute("own_module:VALUE", "source"), import_attribute("own_package.part:VALUE", "source"))
"""


def test_an_attribute_of_an_installed_module():
    assert import_attribute("pathlib:Path", "source") is Path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pathlib", "source='pathlib': expected 'module:attribute'"),
        ("no_such_module:x", "source='no_such_module:x': No module named 'no_such_module'"),
        ("pathlib:no_such", "source='pathlib:no_such': module 'pathlib' has no attribute 'no_such'"),
        (":x", "source=':x': Empty module name"),
    ],
)
def test_an_unknown_name_is_an_error(name, message):
    with pytest.raises(ValueError) as error:
        import_attribute(name, "source")
    assert str(error.value) == message


def test_a_script_elsewhere_finds_modules_in_the_current_directory(tmp_path):
    """The first entry of the script's `sys.path` is the script's own directory, as for a console script."""
    (tmp_path / "bin").mkdir()
    script, project = tmp_path / "bin" / "script", tmp_path / "project"
    script.write_text(SCRIPT.format(python=sys.executable, root=str(Path(__file__).parents[2])))
    (project / "own_package").mkdir(parents=True)
    (project / "own_module.py").write_text("VALUE = 1\n")
    # A module in the current directory can import another one there.
    (project / "own_package" / "part.py").write_text("from own_module import VALUE as ONE\nVALUE = ONE + 1\n")
    command = [sys.executable, str(script)]
    found = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert found.stdout == "1 2\n"
