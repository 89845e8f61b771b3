"""The prompts of a distillation: JSON Lines files, or a source of the user's own."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from bass_jax.checkpoint import Tokenizer
from bass_jax.models import Model
from bass_jax.runtime.files import read_jsonl
from bass_jax.runtime.imports import import_attribute
from bass_jax.training.distill_config import DistillConfig


class Prompt(NamedTuple):
    """One user message."""

    text: str  # without the chat template
    source: str  # where it is from, such as the name of its file


@runtime_checkable
class PromptSource(Protocol):
    """Provides the prompts of a distillation.

    A configuration names a function that makes one: ``prompts.source: "module:attribute"``. The function is called with
    the `DistillConfig` before a model is loaded. It raises a ValueError if data are missing.
    """

    @property
    def description(self) -> Mapping[str, Any]:
        """What the training prompts depend on. A corpus that was begun with another description is refused."""
        ...

    def prompts(self) -> Sequence[Prompt]:
        """Returns the training prompts in a reproducible order; the corpus takes as many as it needs."""
        ...

    def held_out(self) -> Sequence[Prompt]:
        """Returns the prompts to evaluate on; the source of each is the name of its domain."""
        ...

    def find_overlap(self, text: str) -> str | None:
        """Returns what a training prompt, with or without the chat template, shares with a held-out prompt, or None."""
        ...


@runtime_checkable
class GeneratedPromptSource(PromptSource, Protocol):
    """A source that lets the target write some of its prompts."""

    def write_prompts(self, target: Model, tokenizer: Tokenizer) -> None:
        """Writes the prompts. Called before `prompts`; after an interruption it continues."""
        ...


def prompt_source(config: DistillConfig) -> PromptSource:
    """Makes the prompt source of a configuration.

    Raises:
        ValueError: if data are missing, or `prompts.source` does not return a `PromptSource`.
    """
    name = config.prompts.source
    if name is None:
        return JsonlPrompts(config)
    source = import_attribute(name, "prompts.source")(config)
    if not isinstance(source, PromptSource):
        raise ValueError(f"prompts.source={name!r}: returned {type(source).__name__}: expected a PromptSource")
    return source


class JsonlPrompts:
    """Prompts from JSON Lines files, in random order. Prompts that contain a held-out prompt are left out."""

    def __init__(self, config: DistillConfig):
        """Reads the files.

        Raises:
            ValueError: if a file cannot be read, a row lacks a field of the template, or no prompt is left.
        """
        options = config.prompts
        self.description = {"files": [Path(file).name for file in options.files], "template": options.template}
        self._held_out = [prompt for file in options.held_out for prompt in _read_prompts(file, options.template)]
        self._held_out_words = {_words(prompt.text): prompt.text for prompt in self._held_out}
        found = [prompt for file in options.files for prompt in _read_prompts(file, options.template)]
        self._prompts = [prompt for prompt in found if self.find_overlap(prompt.text) is None]
        if not self._prompts:
            raise ValueError(f"prompts.files: no prompt is left: {len(found)} were read, and all contain held-out ones")
        random.Random(config.seed).shuffle(self._prompts)

    def prompts(self) -> list[Prompt]:
        """Returns the prompts, shuffled with the configuration's seed."""
        return self._prompts

    def held_out(self) -> list[Prompt]:
        """Returns all prompts of the held-out files."""
        return self._held_out

    def find_overlap(self, text: str) -> str | None:
        """Returns a held-out prompt whose words `text` contains, or None."""
        words = _words(text)
        return next((held_out for found, held_out in self._held_out_words.items() if found in words), None)


def fill_template(template: str, row: Mapping[str, Any], place: str) -> str:
    """Replaces the fields of a template.

    Args:
        template: with ``{field}``, or ``{field[0][key]}`` for what a field holds.
        row: the fields.
        place: where the row is from, for the error message.

    Raises:
        ValueError: if the row lacks a field.
    """
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{place}: template {template!r}: {reason}") from None


def _read_prompts(file: str, template: str) -> Iterator[Prompt]:
    path = Path(file)
    for number, row in read_jsonl(path):
        yield Prompt(fill_template(template, row, f"{path}:{number}"), path.name.split(".")[0])


def _words(text: str) -> str:
    return f" {' '.join(re.findall(r'\w+', text.lower()))} "
