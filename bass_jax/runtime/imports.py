"""Finds what a configuration or a command line names as ``"module:attribute"``."""

import importlib
import os
import sys
from typing import Any


def import_attribute(name: str, argument: str) -> Any:
    """Imports the attribute that `name` refers to.

    Modules in the current directory are found too, as with ``python -m``. The script ``bass-jax`` does not have that
    directory on its path.

    Args:
        name: ``"module:attribute"``.
        argument: what the caller calls it, for the error message.

    Raises:
        ValueError: if there is no such module or attribute.
    """
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"{argument}={name!r}: expected 'module:attribute'")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{argument}={name!r}: {error}") from None
