"""Reads rows of data from a file, an installed package, or the ``datasets`` library."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bass_jax.experiments.tasks.base import Row
from bass_jax.runtime.bundled import find_bundled, find_in_package
from bass_jax.runtime.files import one_line, read_jsonl


def read_data(source: str) -> list[Row]:
    """Reads a data set.

    Args:
        source: path of a ``.jsonl``, ``.json``, ``.csv`` (each also ``.gz``) or ``.txt`` file (a prompt per line, under
            ``"prompt"``); ``"package:module/path"`` of such a file inside an installed package, which is not imported;
            ``"datasets:name:split"`` or ``"datasets:name:config:split"`` of the library ``datasets``; or
            ``"random:rows:tokens"``, rows of the task ``random_tokens``.

    Raises:
        ValueError: if the source cannot be read; the message names the file and line, the package, or the library.
    """
    kind, separator, rest = source.partition(":")
    if separator and kind == "datasets":
        return _from_datasets(source, rest)
    if separator and kind == "random":
        return _random(source, rest)
    path = find_in_package(source) if separator and kind == "package" else find_bundled(source)
    rows = list(_from_file(path))
    if not rows:
        raise ValueError(f"{source}: holds no rows")
    return rows


def _random(source: str, rest: str) -> list[Row]:
    try:
        num_rows, num_tokens = map(int, rest.split(":"))
    except ValueError:
        raise ValueError(f"{source}: expected random:rows:tokens, as in random:64:128") from None
    if min(num_rows, num_tokens) < 1:
        raise ValueError(f"{source}: expected positive numbers")
    return [{"id": str(index), "num_tokens": num_tokens} for index in range(num_rows)]


def _from_file(path: Path) -> Iterable[Row]:
    is_gzip = path.suffix == ".gz"
    suffix = Path(path.stem).suffix if is_gzip else path.suffix
    if suffix == ".jsonl":
        return (row for _, row in read_jsonl(path))
    opener: Callable = gzip.open if is_gzip else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            text = file.read()
        content = json.loads(text) if suffix == ".json" else None
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {one_line(error)}") from None
    if suffix == ".txt":
        return ({"prompt": line} for line in text.splitlines() if line.strip())
    if suffix == ".csv":
        return csv.DictReader(io.StringIO(text))
    if suffix != ".json":
        raise ValueError(f"{path}: expected .jsonl, .json, .csv or .txt, optionally with .gz")
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError(f"{path}: expected a list of objects")
    return content


def _from_datasets(source: str, rest: str) -> list[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"{source}: needs the library datasets: pip install 'bass-jax[tasks]'") from None
    name, *others = rest.split(":")
    if not 1 <= len(others) <= 2:
        raise ValueError(f"{source}: expected datasets:name:split or datasets:name:config:split")
    try:
        return list(datasets.load_dataset(name, *others[:-1], split=others[-1]))
    except Exception as error:  # The library raises many kinds without a network.
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None
