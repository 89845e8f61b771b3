"""Prompts from arguments, a text file, standard input or a JSONL data set."""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def add_prompt_arguments(parser: argparse._ActionsContainer, limit: int | None = None) -> None:
    """Declares the options that `prompts_of` reads; `limit` is the default of ``--limit``."""
    parser.add_argument("--field", default="prompt", help="key of the prompt in a JSONL line (default: %(default)s)")
    shown = "all" if limit is None else "%(default)s"
    parser.add_argument("--limit", type=int, default=limit, help=f"take only the first so many (default: {shown})")
    parser.add_argument("--template", default="{prompt}", help=r"what is asked around {prompt}; \n is a new line")


def prompts_of(options: argparse.Namespace, file: Path | None, arguments: Sequence[str] = ()) -> list[str]:
    """Collects the prompts as the options of `add_prompt_arguments` say; see `read_prompts`.

    Raises:
        ValueError: as `read_prompts`, or if ``--limit`` leaves none.
    """
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit {options.limit}: expected at least 1")
    return read_prompts(arguments, file, options.field, options.template)[: options.limit]


def read_prompts(arguments: Sequence[str], file: Path | None, field: str, template: str) -> list[str]:
    """Collects the prompts of a command line.

    Args:
        arguments: prompts themselves; ``"-"`` reads standard input, one prompt per line.
        file: ``.jsonl`` or ``.jsonl.gz`` with the prompt under `field`, else a text file with one per line.
        field: key of the prompt in a JSONL line; a list's first element is taken (``turns``).
        template: what is asked, with ``{prompt}`` where the prompt goes; a backslash and an n in it are a new line.

    Raises:
        ValueError: naming file and line, if there are no prompts or one cannot be read.
    """
    prompts = list(arguments)
    if file is not None:
        prompts += list(_read_jsonl(file, field) if ".jsonl" in file.name else _read_lines(file))
    if "-" in prompts or (not prompts and not sys.stdin.isatty()):
        piped = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        prompts = [prompt for prompt in prompts if prompt != "-"] + piped
    if not prompts:
        raise ValueError("no prompts: give some as arguments, with --file, or on standard input")
    if "{prompt}" not in template:
        raise ValueError(f"--template {template!r}: expected {{prompt}} in it")
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {index} is empty")
    template = template.replace("\\n", "\n")
    return [template.replace("{prompt}", prompt) for prompt in prompts]


def _read_lines(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
    return (line for line in text.splitlines() if line.strip())


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)[field]
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}:{number}: not JSON: {error}") from None
                except (KeyError, TypeError):
                    raise ValueError(f"{file}:{number}: no field {field!r}") from None
                value = value[0] if isinstance(value, list) and value else value
                if not isinstance(value, str):
                    raise ValueError(f"{file}:{number}: {field!r} is not text")
                yield value
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None
