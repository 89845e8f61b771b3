"""Reads and writes files: JSON, hashes, one-line messages."""

import hashlib
import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: naming the file, if it is absent or something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return content


def sha256(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its kind if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
