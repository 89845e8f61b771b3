"""Turns a data recipe into prompts, in one reproducible order."""

import ast
import gzip
import json
import random
import string
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bass_jax.training.overlap import OverlapCheck
from bass_jax.training.python_functions import documented_signature, python_functions
from bass_jax.training.recipe import DocumentedCodeSource, HeldOut, JsonlSource, PromptRecipe, SelfAskedSource


class Prompt(NamedTuple):
    """One user message.

    Attributes:
        text: the message, for the chat template.
        source: name of the source, or of the held-out domain.
    """

    text: str
    source: str


class PromptList(NamedTuple):
    """The prompts of a recipe.

    Attributes:
        prompts: in order; any prefix holds the sources by their shares, until one is exhausted.
        num_excluded: rows left out because they overlap a held-out prompt, by source.
    """

    prompts: list[Prompt]
    num_excluded: dict[str, int]


def build_prompts(recipe: PromptRecipe, seed: int, questions: Path | None = None) -> PromptList:
    """Reads every source, leaves out what overlaps the held-out prompts, and interleaves.

    Args:
        recipe: the sources.
        seed: of the order and of the choice of templates.
        questions: directory of what the target asked itself; see `write_questions`.

    Raises:
        ValueError: if a file is absent or unreadable, a field is missing, or nothing is left.
    """
    root = Path(recipe.data_dir)
    check = OverlapCheck(held_out_texts(recipe), recipe.overlap_words)
    ranked: list[tuple[float, int, Prompt]] = []
    excluded: dict[str, int] = {}
    for index, source in enumerate(recipe.sources):
        generator = random.Random(f"{seed} {source.name}")
        contents = list(_contents(source, root, questions))
        kept = [content for content in contents if check.find(" ".join(_strings(content))) is None]
        excluded[source.name] = len(contents) - len(kept)
        generator.shuffle(kept)
        kept = kept[: source.limit]
        for rank, content in enumerate(kept * source.repeats):
            template = generator.choice(source.templates)
            text = _fill(template, content, source.name)
            # A template can join words that the row had apart.
            if check.find(text) is not None:
                excluded[source.name] += 1
                continue
            ranked.append(((rank + generator.random()) / source.share, index, Prompt(text, source.name)))
    if not ranked:
        raise ValueError("sources: no prompt is left after the exclusion of held-out ones")
    ranked.sort(key=lambda item: item[:2])
    return PromptList([prompt for *_, prompt in ranked], excluded)


def held_out_prompts(recipe: PromptRecipe) -> list[Prompt]:
    """Returns the messages to evaluate on: of each domain `num_prompts`, spread over its file.

    Raises:
        ValueError: as `build_prompts`.
    """
    prompts = []
    for domain in recipe.held_out:
        rows = list(read_rows(Path(recipe.data_dir) / domain.file, domain.where))
        count = min(domain.num_prompts, len(rows))
        chosen = [rows[index * len(rows) // count] for index in range(count)]
        prompts += [Prompt(_fill(domain.templates[0], row, domain.name), domain.name) for row in chosen]
    return prompts


def held_out_texts(recipe: PromptRecipe) -> Iterator[str]:
    """Yields every held-out row's fields that a template uses, before the template.

    Raises:
        ValueError: as `build_prompts`.
    """
    for domain in recipe.held_out:
        bare = _bare_template(domain)
        for row in read_rows(Path(recipe.data_dir) / domain.file, domain.where):
            yield _fill(bare, row, domain.name)


def read_rows(
    path: Path, where: Mapping[str, tuple[tuple[float | int, float | int], ...]] | None = None
) -> Iterator[dict[str, Any]]:
    """Reads JSON lines, gzipped or not, whose fields lie in the ranges of `where`.

    Raises:
        ValueError: naming the file and the line.
    """
    opener: Callable = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}: line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is not a JSON object")
        for field, ranges in (where or {}).items():
            if field not in row:
                raise ValueError(f"{path}: line {number} has no field {field!r}")
            if not any(low <= row[field] <= high for low, high in ranges):
                break
        else:
            yield row


def question_file(questions: Path, name: str) -> Path:
    """Where the messages of a self-asked source lie, as JSON lines with ``prompt``."""
    return questions / f"{name}.jsonl"


def _contents(source, root: Path, questions: Path | None) -> Iterator[dict[str, Any]]:
    if isinstance(source, JsonlSource):
        yield from read_rows(root / source.file, source.where)
    elif isinstance(source, SelfAskedSource):
        if questions is None:
            raise ValueError(f"{source.name}: expected a directory of what the target asked itself")
        for row in read_rows(question_file(questions, source.name)):
            yield {"prompt": row["prompt"]}
    elif isinstance(source, DocumentedCodeSource):
        for row in read_rows(root / source.file, source.where):
            if (prompt := _documented(row, source)) is not None:
                yield {"prompt": prompt, source.text_field: row[source.text_field]}
    else:
        for prompt in python_functions(source.packages, source.max_chars):
            yield {"prompt": prompt}


def _documented(row, source: DocumentedCodeSource) -> str | None:
    for field in (source.text_field, source.code_field, source.tests_field):
        if field not in row:
            raise ValueError(f"{source.name}: {source.file} has no field {field!r}")
    doctests = []
    called = None
    for test in row[source.tests_field]:
        statement = next(iter(_parse(test.strip())), None)
        if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
            return None
        call, expected = statement.test.left, statement.test.comparators[0]
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return None
        called = call.func.id
        doctests += [f">>> {ast.unparse(call)}", ast.unparse(expected)]
    for node in _parse(row[source.code_field].replace("\r\n", "\n")):
        if isinstance(node, ast.FunctionDef) and node.name == called:
            return documented_signature(node, "\n".join([row[source.text_field], *doctests]))
    return None


def _parse(code: str) -> list[ast.stmt]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return ast.parse(code).body
        except SyntaxError:
            return []


def _fill(template: str, row: Mapping[str, Any], name: str) -> str:
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name}: template {template!r}: {reason}") from None


def _bare_template(domain: HeldOut) -> str:
    """Keeps only a template's fields: the words around them occur in every prompt."""
    fields = [name for _, name, _, _ in string.Formatter().parse(domain.templates[0]) if name]
    return " ".join(f"{{{field}}}" for field in fields)


def _strings(content: Mapping[str, Any]) -> Iterator[str]:
    """Yields the strings inside a row, nested ones too."""
    for value in content.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _strings(value)
        elif isinstance(value, list):
            yield from _strings({str(index): item for index, item in enumerate(value)})
