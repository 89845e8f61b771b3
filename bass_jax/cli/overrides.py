"""``PATH=VALUE`` on a command line: a key of a configuration, overridden."""

from collections.abc import Sequence
from typing import Any


def read_overrides(texts: Sequence[str], option: str = "") -> dict[str, Any]:
    """Reads overrides; values are YAML.

    Args:
        texts: ``"training.num_steps=10"``.
        option: what stands before each on the command line, for the message.

    Raises:
        ValueError: quoting what is no ``PATH=VALUE``.
    """
    return dict(_read(text, option) for text in texts)


def _read(text: str, option: str) -> tuple[str, Any]:
    import yaml

    path, separator, value = text.partition("=")
    if not separator or not path:
        raise ValueError(f"{option}{text!r}: expected PATH=VALUE")
    try:
        return path, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"{option}{text!r}: the value is not YAML") from None
