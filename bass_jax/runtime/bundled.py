"""Finds files that come with a package: our quickstart pair and configurations, and data in other packages.

Imports no library, because the command line uses it before it imports jax.
"""

import importlib.util
import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = _PACKAGE / "bundled"
"""Where an installed package holds these files. A checkout of the repository holds them at its root."""


def find_bundled(path: str | os.PathLike[str]) -> Path:
    """Returns `path` if it exists or is absolute; otherwise the file of this name that comes with the package, if any.

    Paths that begin with ``checkpoints`` or ``configs`` are therefore found from any directory.
    """
    path = Path(path)
    found = (_INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent) / path
    is_bundled = path.parts[:1] in (("checkpoints",), ("configs",)) and ".." not in path.parts
    return found if is_bundled and not path.exists() and found.exists() else path


def find_in_package(source: str) -> Path:
    """Returns the file ``"package:module/path"`` inside an installed package, which is not imported.

    Raises:
        ValueError: if the package is not installed or does not hold the file.
    """
    module, _, inside = source.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(module)
    if found is None:
        raise ValueError(f"{source}: the package {module!r} is not installed")
    for folder in map(Path, found.submodule_search_locations or ()):
        for root in (folder, folder.parent):  # Some packages install their data next to the module.
            if (root / inside).is_file():
                return root / inside
    raise ValueError(f"{source}: {module!r} holds no file {inside!r}")


def is_installed(path: Path) -> bool:
    """Returns whether `path` lies in an installed package, in which nothing should be written."""
    return path.resolve().is_relative_to(_INSTALLED)
