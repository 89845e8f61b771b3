"""The options of the mixture: its sources, and the prompts that must not be trained on."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from bass_jax.runtime.yaml_config import forbid_extra

CODE_TEMPLATES = (
    "Complete the following Python function:\n\n```python\n{prompt}```",
    "Complete the following Python function:\n```python\n{prompt}\n```",
    "Complete the following Python function.\n\n```python\n{prompt}```\n",
    "Complete this function:\n\n{prompt}",
    "Implement the following Python function.\n\n```python\n{prompt}```",
    "Write the body of this Python function:\n\n```python\n{prompt}```",
)
"""User messages around a signature with its docstring."""

type Ranges = Mapping[str, tuple[tuple[float | int, float | int], ...]]
"""Maps a numeric field to inclusive ranges; the field of a row must be in one of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """What all sources have.

    Attributes:
        name: of the source, in the corpus.
        templates: user messages with ``{field}`` (or ``{field[0][key]}``) for a row's fields. Each prompt uses a random
            one.
        share: weight of the source in any prefix of the mixture.
        repeats: how often each row is used, each time with a new random template.
        limit: maximum number of rows.
    """

    name: str
    templates: tuple[str, ...]
    share: float | int = 1
    repeats: int = 1
    limit: int | None = None

    def __post_init__(self):
        if not self.share > 0:
            raise ValueError(f"share={self.share}: expected a positive weight")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: expected at least 1")
        if not self.templates:
            raise ValueError("templates: expected at least one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSource(_Source):
    """A source that reads the rows of a JSON Lines file.

    Attributes:
        file: relative to `MixtureConfig.data_dir`, gzipped or not.
        where: the rows that are used.
    """

    file: str
    where: Ranges = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlSource(FileSource):
    """Prompts from rows as they are."""

    kind: Literal["jsonl"] = "jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentedCodeSource(FileSource):
    """Signatures with a docstring and doctests, from rows with a description, a solution and assertions.

    Attributes:
        text_field: the description, which becomes the docstring.
        code_field: the solution, which contains the function that the assertions call.
        tests_field: a list of ``assert f(x) == y``, which become doctests.
    """

    kind: Literal["documented_code"] = "documented_code"
    templates: tuple[str, ...] = CODE_TEMPLATES
    text_field: str = "text"
    code_field: str = "code"
    tests_field: str = "test_list"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonFunctionsSource(_Source):
    """Documented functions of installed packages. The files are parsed; nothing is imported.

    Attributes:
        packages: import names; ``"stdlib"`` is the standard library. Packages that are not installed are skipped.
        max_chars: functions whose signature and docstring are longer are skipped.
    """

    packages: tuple[str, ...]
    kind: Literal["python_functions"] = "python_functions"
    templates: tuple[str, ...] = CODE_TEMPLATES
    max_chars: int = 800


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAskedSource(_Source):
    """User messages that the target itself generates, given the chat template up to the user's message.

    An instruction-tuned target generates messages like those that it was tuned on (Magpie, Xu et al. 2024).

    Attributes:
        num: messages to sample. Unfinished messages and duplicates are dropped.
        temperature: of sampling.
        top: tokens are sampled from this many of the most probable ones.
        max_new_tokens: longer messages are dropped as unfinished.
    """

    num: int
    kind: Literal["self_asked"] = "self_asked"
    templates: tuple[str, ...] = ("{prompt}",)
    temperature: float | int = 1.0
    top: int = 64
    max_new_tokens: int = 128

    def __post_init__(self):
        super().__post_init__()
        for name in ("num", "temperature", "top", "max_new_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number")


type Source = Annotated[
    JsonlSource | DocumentedCodeSource | PythonFunctionsSource | SelfAskedSource, Field(discriminator="kind")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Prompts to evaluate on, which are left out of the sources.

    Attributes:
        name: of the domain, in reports.
        file: relative to `MixtureConfig.data_dir`, gzipped or not.
        template: the user message, as in a source.
        where: the rows that are held out.
        num_prompts: how many are evaluated on, spread evenly over the file; all are left out of the sources.
    """

    name: str
    file: str
    template: str
    where: Ranges = dataclasses.field(default_factory=dict)
    num_prompts: int = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The options of `MixedPrompts`: ``prompts.options`` of the configuration.

    Attributes:
        sources: mixed by their shares.
        held_out: prompts to evaluate on.
        data_dir: directory of the files.
        overlap_words: a prompt that shares this many consecutive words with a held-out one is left out.
    """

    sources: tuple[Source, ...]
    held_out: tuple[HeldOut, ...] = ()
    data_dir: str = "data"
    overlap_words: int = 13

    def __post_init__(self):
        if not self.sources:
            raise ValueError("sources: expected at least one")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: names {names} are not distinct")
        if self.overlap_words < 2:
            raise ValueError(f"overlap_words={self.overlap_words}: expected at least 2")


forbid_extra(JsonlSource, DocumentedCodeSource, PythonFunctionsSource, SelfAskedSource, HeldOut, MixtureConfig)
