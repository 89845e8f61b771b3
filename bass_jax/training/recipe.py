"""The data recipe of a distillation: where its prompts come from, and which prompts it must not see."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

CODE_TEMPLATES = (
    "Complete the following Python function:\n\n```python\n{prompt}```",
    "Complete the following Python function:\n```python\n{prompt}\n```",
    "Complete the following Python function.\n\n```python\n{prompt}```\n",
    "Complete this function:\n\n{prompt}",
    "Implement the following Python function.\n\n```python\n{prompt}```",
    "Write the body of this Python function:\n\n```python\n{prompt}```",
)
"""Phrasings around a signature with its docstring."""


@dataclasses.dataclass(frozen=True)
class JsonlSource:
    """Prompts from the rows of a JSON-lines file.

    Attributes:
        name: of the source, in the corpus and in reports.
        file: relative to `PromptRecipe.data_dir`; ``.gz`` is read as such.
        templates: user messages with ``{field}`` (or ``{field[0][key]}``) for a row's fields; each prompt
            takes one, by the recipe's seed.
        share: weight of the source in any prefix of the corpus.
        where: numeric field to inclusive ranges, one of which a row's value must lie in.
        repeats: times that every row is used, each with a template drawn anew.
        limit: rows at most, after `where`.
    """

    name: str
    file: str
    templates: tuple[str, ...]
    kind: Literal["jsonl"] = "jsonl"
    share: float | int = 1
    where: Mapping[str, tuple[tuple[float | int, float | int], ...]] = dataclasses.field(default_factory=dict)
    repeats: int = 1
    limit: int | None = None

    def __post_init__(self):
        _check_source(self)


@dataclasses.dataclass(frozen=True)
class DocumentedCodeSource:
    """Signatures with docstring and doctests, from rows that hold a description, a solution and assertions.

    Attributes:
        name: see `JsonlSource`, as `file`, `share`, `where`, `repeats` and `limit`.
        file: the JSON-lines file.
        text_field: the description, which becomes the docstring.
        code_field: the solution, which gives the signature of the function that the assertions call.
        tests_field: list of ``assert f(x) == y``, which become doctests.
        templates: user messages with ``{prompt}``.
        share: weight.
        where: ranges of fields.
        repeats: times that every row is used.
        limit: rows at most.
    """

    name: str
    file: str
    kind: Literal["documented_code"] = "documented_code"
    text_field: str = "text"
    code_field: str = "code"
    tests_field: str = "test_list"
    templates: tuple[str, ...] = CODE_TEMPLATES
    share: float | int = 1
    where: Mapping[str, tuple[tuple[float | int, float | int], ...]] = dataclasses.field(default_factory=dict)
    repeats: int = 1
    limit: int | None = None

    def __post_init__(self):
        _check_source(self)


@dataclasses.dataclass(frozen=True)
class PythonFunctionsSource:
    """Documented functions of installed packages, read as text: nothing is imported.

    Attributes:
        name: see `JsonlSource`, as `share`, `repeats` and `limit`.
        packages: import names; ``"stdlib"`` is the standard library. Absent packages are skipped.
        templates: user messages with ``{prompt}``.
        max_chars: functions whose signature and docstring are longer are skipped.
        share: weight.
        repeats: times that every function is used.
        limit: functions at most.
    """

    name: str
    packages: tuple[str, ...]
    kind: Literal["python_functions"] = "python_functions"
    templates: tuple[str, ...] = CODE_TEMPLATES
    max_chars: int = 800
    share: float | int = 1
    repeats: int = 1
    limit: int | None = None

    def __post_init__(self):
        _check_source(self)


@dataclasses.dataclass(frozen=True)
class SelfAskedSource:
    """Messages that the target writes itself, from where its chat template lets the user speak.

    An instruction-tuned target then asks what it was tuned to answer (Magpie, Xu et al. 2024).

    Attributes:
        name: see `JsonlSource`, as `share`, `repeats` and `limit`.
        num: messages to draw; those that are cut off, or said before, are dropped.
        temperature: of the draws.
        top: they are drawn among so many of the most probable tokens.
        max_new_tokens: a longer message is cut off.
        templates: around ``{prompt}``, the message.
        share: weight.
        repeats: times that every message is used.
        limit: messages at most.
    """

    name: str
    num: int
    kind: Literal["self_asked"] = "self_asked"
    temperature: float | int = 1.0
    top: int = 64
    max_new_tokens: int = 128
    templates: tuple[str, ...] = ("{prompt}",)
    share: float | int = 1
    repeats: int = 1
    limit: int | None = None

    def __post_init__(self):
        _check_source(self)
        for name in ("num", "temperature", "top", "max_new_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")


Source = Annotated[
    JsonlSource | DocumentedCodeSource | PythonFunctionsSource | SelfAskedSource, Field(discriminator="kind")
]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Prompts to evaluate on; the corpus must not contain them.

    Attributes:
        name: of the domain, in reports.
        file: relative to `PromptRecipe.data_dir`.
        templates: as in `JsonlSource`; the first is used.
        where: as in `JsonlSource`.
        num_prompts: how many are evaluated on (spread evenly over the file); all are excluded.
    """

    name: str
    file: str
    templates: tuple[str, ...]
    where: Mapping[str, tuple[tuple[float | int, float | int], ...]] = dataclasses.field(default_factory=dict)
    num_prompts: int = 40


@dataclasses.dataclass(frozen=True)
class PromptRecipe:
    """Where prompts come from.

    Attributes:
        sources: interleaved by their shares.
        held_out: evaluation prompts, excluded from the sources.
        data_dir: directory that the files are relative to.
        overlap_words: a prompt that shares this many consecutive words with a held-out one is dropped.
        max_prompt_tokens: longer prompts, counted with the chat template, are dropped.
    """

    sources: tuple[Source, ...]
    held_out: tuple[HeldOut, ...] = ()
    data_dir: str = "data"
    overlap_words: int = 13
    max_prompt_tokens: int = 256

    def __post_init__(self):
        if not self.sources:
            raise ValueError("sources: expected at least one")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: names {names} are not distinct")
        if self.overlap_words < 2:
            raise ValueError(f"overlap_words={self.overlap_words}: expected at least 2")


def _check_source(source):
    if not source.share > 0:
        raise ValueError(f"share={source.share}: expected a positive weight")
    if source.repeats < 1:
        raise ValueError(f"repeats={source.repeats}: expected at least 1")
    if not source.templates:
        raise ValueError("templates: expected at least one")
