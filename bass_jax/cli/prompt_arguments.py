"""Prompts from arguments, text files, standard input and JSONL data sets."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bass_jax.cli.arguments import Argument, argument
from bass_jax.runtime.bundled import find_bundled, find_in_package


def prompt_arguments(limit: int | None = None) -> tuple[Argument, ...]:
    """Declares the options that `prompts_of` reads; `limit` is the default of ``--limit``."""
    return (
        argument("--field", "key of the prompt in a JSONL line", "prompt"),
        argument(
            "--limit", "use only the first prompts" + (" (default: all)" if limit is None else ""), limit, type=int
        ),
        argument("--template", r"text around {prompt}; \n is a line break", "{prompt}"),
    )


def prompts_of(options: argparse.Namespace, file: Path | None, arguments: Sequence[str] = ()) -> list[str]:
    """Returns the prompts that the options of `prompt_arguments` describe; see `collect_prompts`.

    Raises:
        ValueError: as `collect_prompts`, or if ``--limit`` is not positive.
    """
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit {options.limit}: expected at least 1")
    return collect_prompts(arguments, file, options.field, options.template)[: options.limit]


def collect_prompts(arguments: Sequence[str], file: Path | None, field: str, template: str) -> list[str]:
    """Returns the prompts of a command line.

    Args:
        arguments: prompts; ``"-"`` reads standard input, one prompt per line.
        file: ``.jsonl`` or ``.jsonl.gz`` with the prompt under `field`, or a text file with one prompt per line;
            ``package:module/path`` is a file in an installed package.
        field: key of the prompt in a JSONL line. If the value is a list, its first element is the prompt.
        template: text that contains ``{prompt}``; a backslash followed by n is a line break.

    Raises:
        ValueError: if there are no prompts or one cannot be read; the message names the file and the line.
    """
    prompts = list(arguments)
    if file is not None:
        file = find_in_package(str(file)) if str(file).startswith("package:") else find_bundled(file)
        prompts += _read_jsonl(file, field) if ".jsonl" in file.name else _read_lines(file)
    if "-" in prompts or (not prompts and not sys.stdin.isatty()):
        piped = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        prompts = [prompt for prompt in prompts if prompt != "-"] + piped
    if not prompts:
        raise ValueError("no prompts: expected some as arguments, with --file, or on standard input")
    if "{prompt}" not in template:
        raise ValueError(f"--template {template!r}: expected {{prompt}} in it")
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {index} is empty")
    template = template.replace("\\n", "\n")
    return [template.replace("{prompt}", prompt) for prompt in prompts]


def _read_lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    from bass_jax.runtime.files import read_jsonl

    for number, row in read_jsonl(file):
        if field not in row:
            raise ValueError(f"{file}:{number}: no field {field!r}")
        value = row[field]
        value = value[0] if isinstance(value, list) and value else value
        if not isinstance(value, str):
            raise ValueError(f"{file}:{number}: {field!r} is not text")
        yield value
