"""The prompts of the quickstart draft: several sources mixed in one reproducible order."""

import ast
import dataclasses
import random
import string
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bass_jax.checkpoint import Tokenizer
from bass_jax.models import Model
from bass_jax.runtime.files import read_jsonl
from bass_jax.runtime.yaml_config import parse_yaml
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.prompts import Prompt, fill_template
from recipes.quickstart_draft.overlap import OverlapCheck
from recipes.quickstart_draft.python_functions import documented_signature, python_functions
from recipes.quickstart_draft.questions import write_questions
from recipes.quickstart_draft.sources import (
    DocumentedCodeSource,
    FileSource,
    HeldOut,
    JsonlSource,
    MixtureConfig,
    PythonFunctionsSource,
    Ranges,
    SelfAskedSource,
    Source,
)

type Row = Mapping[str, Any]


class MixedPrompts:
    """A `GeneratedPromptSource` that mixes several sources by their shares.

    Prompts that share a run of words with a held-out prompt are left out, before and after their template is filled in.
    """

    def __init__(self, config: DistillConfig):
        """Reads all files.

        Args:
            config: ``prompts.options`` holds a `MixtureConfig`.

        Raises:
            ValueError: if an option is wrong, or a file is missing or unreadable.
        """
        options = parse_yaml(MixtureConfig, config.prompts.options, "prompts.options")
        root = Path(options.data_dir)
        with_file = [source for source in options.sources if isinstance(source, FileSource)]
        files = [part.file for part in (*with_file, *options.held_out)]
        if missing := sorted({file for file in files if not (root / file).is_file()}):
            raise ValueError(
                f"prompts.options.data_dir={options.data_dir!r}: {', '.join(missing)}: no such file; "
                "recipes/quickstart_draft/README.md says where to get them"
            )
        self._sources = options.sources
        self._rows = {source.name: list(select_rows(root / source.file, source.where)) for source in with_file}
        self._held_out = [(domain, list(select_rows(root / domain.file, domain.where))) for domain in options.held_out]
        self._overlap = OverlapCheck(_held_out_texts(self._held_out), options.overlap_words)
        self._seed, self._batch = config.seed, config.rollout.batch
        self._questions = config.corpus_root / "questions"
        self.description = {
            "sources": [dataclasses.asdict(source) for source in options.sources],
            "overlap_words": options.overlap_words,
        }

    def write_prompts(self, target: Model, tokenizer: Tokenizer) -> None:
        """Lets the target generate the messages of each `SelfAskedSource`; see `write_questions`."""
        for index, source in enumerate(self._sources):
            if isinstance(source, SelfAskedSource):
                key = jax.random.fold_in(jax.random.key(self._seed), index)
                write_questions(self._question_file(source), source, self._batch, key, target, tokenizer)

    def prompts(self) -> list[Prompt]:
        """Returns the prompts. Any prefix holds the sources by their shares, until one is used up.

        Raises:
            ValueError: if the target has not generated its messages yet, a row lacks a field of a template, or no
                prompt is left.
        """
        ranked: list[tuple[float, int, Prompt]] = []
        for index, source in enumerate(self._sources):
            generator = random.Random(f"{self._seed} {source.name}")
            contents = [row for row in self._contents(source) if self.find_overlap(" ".join(_strings(row))) is None]
            generator.shuffle(contents)
            for rank, row in enumerate(contents[: source.limit] * source.repeats):
                text = fill_template(generator.choice(source.templates), row, source.name)
                # A template can join words that are apart in the row.
                if self.find_overlap(text) is None:
                    rank_in_mixture = (rank + generator.random()) / source.share
                    ranked.append((rank_in_mixture, index, Prompt(text, source.name)))
        if not ranked:
            raise ValueError("prompts.options.sources: no prompt is left without the held-out ones")
        return [prompt for *_, prompt in sorted(ranked, key=lambda item: item[:2])]

    def held_out(self) -> list[Prompt]:
        """Returns `num_prompts` prompts of each held-out domain, spread evenly over its file."""
        prompts = []
        for domain, rows in self._held_out:
            count = min(domain.num_prompts, len(rows))
            for row in (rows[index * len(rows) // count] for index in range(count)):
                prompts.append(Prompt(fill_template(domain.template, row, domain.name), domain.name))
        return prompts

    def find_overlap(self, text: str) -> str | None:
        """Returns the first run of words that `text` shares with a held-out prompt, or None."""
        return self._overlap.find(text)

    def _question_file(self, source: SelfAskedSource) -> Path:
        return self._questions / f"{source.name}.jsonl"

    def _contents(self, source: Source) -> Iterator[Row]:
        """Yields the rows of a source, with the fields that its templates may use."""
        match source:
            case DocumentedCodeSource():
                for row in self._rows[source.name]:
                    if (prompt := _documented(row, source)) is not None:
                        yield {"prompt": prompt, source.text_field: row[source.text_field]}
            case JsonlSource():
                yield from self._rows[source.name]
            case SelfAskedSource():
                for _, row in read_jsonl(self._question_file(source)):
                    yield {"prompt": row["prompt"]}
            case PythonFunctionsSource():
                for prompt in python_functions(source.packages, source.max_chars):
                    yield {"prompt": prompt}


def select_rows(path: Path, where: Ranges) -> Iterator[Row]:
    """Yields the rows of a JSON Lines file whose fields are in the ranges of `where`.

    Raises:
        ValueError: naming the file and the line, if it cannot be read or lacks a field of `where`.
    """
    for number, row in read_jsonl(path):
        if missing := where.keys() - row.keys():
            raise ValueError(f"{path}:{number}: no field {sorted(missing)[0]!r}")
        if all(any(low <= row[field] <= high for low, high in ranges) for field, ranges in where.items()):
            yield row


def _held_out_texts(held_out: Sequence[tuple[HeldOut, Sequence[Row]]]) -> Iterator[str]:
    """Yields the fields of each held-out row that the template uses; the template's words are in every prompt."""
    for domain, rows in held_out:
        fields = [name for _, name, _, _ in string.Formatter().parse(domain.template) if name]
        for row in rows:
            yield fill_template(" ".join(f"{{{field}}}" for field in fields), row, domain.name)


def _documented(row: Row, source: DocumentedCodeSource) -> str | None:
    """Returns the signature of the function that the assertions call, with doctests; None if they have another form."""
    for field in (source.text_field, source.code_field, source.tests_field):
        if field not in row:
            raise ValueError(f"{source.name}: {source.file} has no field {field!r}")
    doctests, called = [], None
    for test in row[source.tests_field]:
        match _parse(test.strip())[:1]:
            case [ast.Assert(test=ast.Compare(left=ast.Call(func=ast.Name(id=called)) as call, comparators=expected))]:
                doctests += [f">>> {ast.unparse(call)}", ast.unparse(expected[0])]
            case _:
                return None
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


def _strings(content: Row) -> Iterator[str]:
    """Yields the strings in a row, also in its lists and objects."""
    for value in content.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _strings(value)
        elif isinstance(value, list):
            yield from _strings({str(index): item for index, item in enumerate(value)})
