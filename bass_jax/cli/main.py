"""The command ``bass-jax``; each subcommand is a module of `bass_jax.cli`.

Nothing here imports jax before a subcommand runs, so that ``--help`` and mistakes are reported at once.
"""

import argparse
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from bass_jax.cli.output import Output
from bass_jax.runtime.names import expected_one_of, nearest

GROUPS = {
    "decode": {
        "demo": "compare speculative with regular decoding, by batch size",
        "generate": "decode prompts with speculation",
        "serve": "answer requests over HTTP, with OpenAI's API",
    },
    "prepare models": {
        "inspect": "describe a checkpoint, and check whether two can be a pair",
        "convert": "convert a checkpoint of any supported format to our own",
        "warm-up": "compile into the cache, so that later starts are fast",
    },
    "measure speed": {
        "bench": "compare the time of steps with the roofline",
        "profile": "time a pair's passes, and fit cost models to them",
        "simulate": "replay other policies, batches and devices on a recorded run",
        "traffic": "serve requests over time, on this device or a simulated one",
        "quantization-error": "measure the effect of INT8 on distributions and acceptance",
    },
    "train a draft": {
        "distill": "train a draft on the target's own outputs",
        "build-datastore": "build a retrieval datastore from the target's own outputs",
    },
    "run experiments": {
        "run": "decode a task with several methods, and score it",
        "sweep": "run an experiment at every point of a grid",
        "report": "write tables and figures of runs",
        "compare": "compare two runs",
    },
}
"""The subcommands by task, each with its summary."""

COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}

_EPILOG = """examples:
  bass-jax demo
  bass-jax generate "Write a haiku about rain." "What is 17 + 25?"
  bass-jax run configs/quickstart.yaml
  bass-jax generate --help                    # options and examples of a command
  source <(bass-jax --print-completion bash)  # completion in this shell

exit codes: 0 success, 2 a caller's mistake, 1 any other failure, 130 interrupted"""

_GC_THRESHOLD = 100_000
"""Objects between two garbage collections. Importing and tracing allocate many objects that stay alive; with Python's
default of 700, a start takes 5 % longer."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, and name the nearest valid value."""

    def error(self, message: str):
        print(f"{self.prog}: {_printable(message)}", file=sys.stderr)
        raise SystemExit(2)

    def exit(self, status: int = 0, message: str | None = None):
        sys.stdout.flush()
        super().exit(status, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r}: {expected_one_of(value, action.choices)}")

    def options(self) -> list[str]:
        """Returns the names of all options."""
        return [name for action in self._actions for name in action.option_strings]


class _TopFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves out argparse's list of subcommands, because the description lists them by task."""

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, argparse._SubParsersAction):
            super().add_argument(action)


class _PrintVersion(argparse.Action):
    """Prints the versions of this package and of jax, which a bug report needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import platform
        from importlib.metadata import version

        from bass_jax import __version__

        print(f"bass-jax {__version__} (jax {version('jax')}, Python {platform.python_version()})")
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints a completion script. It is static, so completing starts no Python."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        import shtab

        for command in _all_parsers(parser):
            for action in command._actions:
                is_file = getattr(action.type, "__name__", "") == "Path" or action.dest in ("pair", "path", "draft")
                if is_file and action.choices is None:
                    action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
        print(shtab.complete(parser, values))
        parser.exit()


def _all_parsers(top: argparse.ArgumentParser) -> list[Any]:
    """Returns the parser of all subcommands and that of each."""
    (commands,) = (action.choices for action in top._actions if isinstance(action.choices, dict))
    return [top, *commands.values()]


def command_module(name: str) -> ModuleType:
    """Returns the module of a subcommand."""
    return importlib.import_module(f"bass_jax.cli.{name.replace('-', '_')}")


def parser() -> _Parser:
    """Returns the parser of all subcommands."""
    lines = ["Batched speculative decoding for JAX."]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:19}{summary}" for name, summary in commands.items())]
    top = _Parser(
        prog="bass-jax",
        description="\n".join(lines),
        epilog=_EPILOG,
        formatter_class=_TopFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action=_PrintVersion, nargs=0, help="print the versions and exit")
    top.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        metavar="SHELL",
        help="print a script that completes commands and options, and exit",
    )
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, summary in COMMANDS.items():
        module = command_module(name)
        command = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("--json", action="store_true", help="print the results as one JSON object")
        module.add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code.

    A caller's mistake (`ValueError`) is one line on standard error and 2; a file that cannot be written or read
    (`OSError`) is one line and 1; Ctrl-C is 130. Any other exception is a defect, which Python reports with 1.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = " ".join(["bass-jax", *[text for text in given[:1] if text in COMMANDS]])
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
    try:
        options = _parse(given)
        out = Output(options.command, is_json=options.json)
        code = command_module(options.command).run(options, out)
        out.finish()
        sys.stdout.flush()  # A full disk is reported here and not at exit.
        return code
    except ValueError as error:
        return _fail(name, str(error), 2)
    except KeyboardInterrupt:
        return _fail(name, "interrupted", 130)
    except BrokenPipeError:  # The reader of the pipe has gone.
        _discard_standard_output()
        return 1
    except OSError as error:
        _discard_standard_output()
        place = "" if error.filename is None else f"{error.filename}: "
        return _fail(name, f"{place}{error.strerror or error}", 1)
    finally:
        gc.set_threshold(*thresholds)


def _parse(given: list[str]) -> argparse.Namespace:
    """Parses a command line; ``options.arguments`` is the command line itself.

    Raises:
        ValueError: for an argument that is not UTF-8, which Python decodes to lone surrogates.
        SystemExit: for other mistakes, and after ``--help``.
    """
    for text in given:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{text!r}: an argument is not valid UTF-8") from None
    top = parser()
    options, rest = top.parse_known_args(given)
    wrong = [text for text in rest if text.startswith("-") or not hasattr(options, "overrides")]
    if wrong:
        command = next(one for one in _all_parsers(top) if one.prog.endswith(f" {options.command}"))
        nearest_option = nearest(wrong[0].partition("=")[0], command.options())
        command.error(f"unrecognized arguments: {' '.join(wrong)}{nearest_option}")
    if rest:  # argparse does not collect positional arguments that follow options.
        options.overrides += rest
    options.arguments = given
    return options


def _fail(name: str, message: str, code: int) -> int:
    print(f"{name}: {_printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _discard_standard_output() -> None:
    """Keeps what was printed; if that fails, lets Python's flush at exit succeed."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in tests
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
