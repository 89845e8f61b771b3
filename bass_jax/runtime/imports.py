"""What a configuration names as ``"module:attribute"``."""

import importlib
from typing import Any


def import_attribute(name: str, argument: str) -> Any:
    """Imports the attribute that `name` refers to.

    Args:
        name: ``"module:attribute"``.
        argument: what the caller calls it, for the message.

    Raises:
        ValueError: if there is no such module or attribute.
    """
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"{argument}={name!r}: expected 'module:attribute'")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{argument}={name!r}: {error}") from None
