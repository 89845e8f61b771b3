"""Reads and writes files: JSON, JSON Lines, hashes, one-line messages."""

import gzip
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
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


def read_jsonl(path: Path, *, skip_partial: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the line numbers and the objects of a JSON Lines file, which may be gzipped.

    Args:
        path: of the file.
        skip_partial: ignore a last line without a line break, which a killed writer may leave.

    Raises:
        ValueError: naming the file and the line, if it cannot be read or a line is not a JSON object.
    """
    opener: Callable = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip() or (skip_partial and not line.endswith("\n")):
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}:{number}: not JSON: {one_line(error)}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: expected a JSON object")
                yield number, row
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it, so that a kill leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sha256(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def user_cache() -> Path:
    """Returns the directory ``bass_jax`` in the user's cache directory; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bass_jax"


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its kind if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
