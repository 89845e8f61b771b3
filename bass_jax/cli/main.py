"""The command ``bass-jax``; each subcommand is a module of `bass_jax.cli`."""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

COMMANDS = {
    "demo": "compare regular and speculative decoding at several batch sizes",
    "generate": "decode prompts with speculation",
    "convert": "convert a checkpoint of any supported format to our own",
    "inspect": "describe a checkpoint, and check whether two can be a pair",
    "warm-up": "compile into the cache, so that later starts are fast",
    "bench": "compare the time of steps with the roofline",
    "quantization-error": "measure the effect of INT8 on distributions and acceptance",
    "profile": "time a pair's passes on this device, and fit cost models to them",
    "simulate": "replay other policies, batches and devices on a recorded run",
    "traffic": "serve requests over time, on this device or a simulated one",
    "distill": "train a draft on the target's own outputs",
    "build-datastore": "build a retrieval datastore from the target's own outputs",
    "run": "run an experiment: decode a task with several methods, and score it",
    "sweep": "run an experiment at every point of a grid",
    "report": "write tables and figures of runs",
    "compare": "compare two runs",
}


_GC_THRESHOLD = 100_000
"""Objects between two garbage collections. Importing and tracing allocate many objects that stay alive; with Python's
default of 700, a start takes 5 % longer."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str):
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def command_module(name: str) -> ModuleType:
    """Returns the module of a subcommand."""
    return importlib.import_module(f"bass_jax.cli.{name.replace('-', '_')}")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    description = "Batched speculative decoding for JAX."
    top = _Parser(prog="bass-jax", description=description, epilog=command_module("generate").EXAMPLES, **options)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, summary in COMMANDS.items():
        module = command_module(name)
        description = f"{summary[0].upper()}{summary[1:]}."
        module.add_arguments(
            commands.add_parser(name, help=summary, description=description, epilog=module.EXAMPLES, **options)
        )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; a caller's mistake is one line on standard error and exit code 2."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse does not collect positional arguments that follow options.
        options.overrides += rest
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
    try:
        return command_module(options.command).run(options)
    except ValueError as error:
        print(f"bass-jax {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"bass-jax {options.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the pipe has gone. Python must not flush the pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        gc.set_threshold(*thresholds)


if __name__ == "__main__":
    sys.exit(main())
