"""Where rows of data come from: a file, an installed package, or the ``datasets`` library."""

import csv
import gzip
import importlib.util
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def read_rows(source: str) -> list[Row]:
    """Reads a data set.

    Args:
        source: path of a ``.jsonl``, ``.json``, ``.csv`` (each also ``.gz``) or ``.txt`` file (a prompt per line, under
            ``"prompt"``); ``"package:module/path"`` of such a file inside an installed package, which is not imported;
            ``"datasets:name:split"`` or ``"datasets:name:config:split"``, through the library ``datasets``; or
            ``"random:rows:tokens"``, so many rows of the task ``random_tokens``.

    Raises:
        ValueError: naming the source and what is wrong: file and line, package, or library.
    """
    kind, separator, rest = source.partition(":")
    if separator and kind == "datasets":
        return list(_from_datasets(source, rest))
    if separator and kind == "random":
        return list(_random(source, rest))
    path = _in_package(source, rest) if separator and kind == "package" else Path(source)
    rows = list(_from_file(path))
    if not rows:
        raise ValueError(f"{source}: holds no rows")
    return rows


def _random(source: str, rest: str) -> Iterator[Row]:
    try:
        num_rows, num_tokens = map(int, rest.split(":"))
    except ValueError:
        raise ValueError(f"{source}: expected random:rows:tokens, as in random:64:128") from None
    if min(num_rows, num_tokens) < 1:
        raise ValueError(f"{source}: expected positive numbers")
    yield from ({"id": str(index), "num_tokens": num_tokens} for index in range(num_rows))


def _in_package(source: str, rest: str) -> Path:
    module, _, inside = rest.partition("/")
    found = importlib.util.find_spec(module)
    places = [] if found is None else list(found.submodule_search_locations or ())
    for place in places:
        # Beside the module too: some packages keep their data next to it.
        for root in (Path(place), Path(place).parent):
            if (root / inside).is_file():
                return root / inside
    problem = f"the package {module!r} is not installed" if found is None else f"{module!r} holds no file {inside!r}"
    raise ValueError(f"{source}: {problem}")


def _from_file(path: Path) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if suffix == ".txt":
        yield from ({"prompt": line} for line in text.splitlines() if line.strip())
    elif suffix == ".csv":
        yield from csv.DictReader(io.StringIO(text))
    elif suffix == ".json":
        content = _parsed(path, 1, text)
        if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
            raise ValueError(f"{path}: expected a list of objects")
        yield from content
    elif suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                row = _parsed(path, number, line)
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: expected an object")
                yield row
    else:
        raise ValueError(f"{path}: expected .jsonl, .json, .csv or .txt, perhaps with .gz")


def _parsed(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from None


def _from_datasets(source: str, rest: str) -> Iterator[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"{source}: needs the library datasets: pip install 'bass-jax[tasks]'") from None
    name, *others = rest.split(":")
    if not 1 <= len(others) <= 2:
        raise ValueError(f"{source}: expected datasets:name:split or datasets:name:config:split")
    try:
        yield from datasets.load_dataset(name, *others[:-1], split=others[-1])
    except Exception as error:  # Whatever the library raises without a network.
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None
