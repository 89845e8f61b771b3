"""The command ``bass-jax``; each subcommand lives in `bass_jax.cli`."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from bass_jax.cli import (
    bench,
    build_datastore,
    compare,
    convert,
    distill,
    generate,
    inspect,
    profile,
    quantization_error,
    report,
    run,
    simulate,
    sweep,
    traffic,
    warm_up,
)

COMMANDS = {
    "generate": (generate, "decode a batch of prompts, with speculation"),
    "convert": (convert, "make a checkpoint of ours from any other"),
    "inspect": (inspect, "say what a checkpoint holds, and whether two can be a pair"),
    "warm-up": (warm_up, "compile ahead, so that the next start is fast"),
    "bench": (bench, "time steps beside what the device's bandwidth allows"),
    "quantization-error": (
        quantization_error,
        "say how far INT8 moves a model's distributions, and what its draft is worth to it",
    ),
    "profile": (profile, "time a pair's passes on this device, and fit cost models to them"),
    "simulate": (simulate, "replay other policies, batches and devices on a recorded run"),
    "traffic": (traffic, "serve requests over time, on this device or a simulated one"),
    "distill": (distill, "train a draft on the target's own outputs"),
    "build-datastore": (build_datastore, "count the target's own outputs into a retrieval datastore"),
    "run": (run, "carry out an experiment: decode a task in several ways, and score it"),
    "sweep": (sweep, "carry out an experiment at every point of a grid"),
    "report": (report, "write tables and figures of runs"),
    "compare": (compare, "put two runs side by side"),
}


_YOUNG_OBJECTS = 100_000
"""Between two searches for garbage. Importing and tracing make many objects that stay: with Python's own 700, a start
takes a twentieth longer."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage in front."""

    def error(self, message: str):
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """Declares all subcommands."""
    top = _Parser(
        prog="bass-jax",
        description="Batched speculative decoding for JAX.",
        epilog=generate.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; a caller's mistake is one line on standard error and exit code 2."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # Positional arguments behind options are left over.
        options.overrides += rest
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    thresholds = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *thresholds[1:])
    try:
        return COMMANDS[options.command][0].run(options)
    except ValueError as error:
        print(f"bass-jax {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"bass-jax {options.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has left; its end must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        gc.set_threshold(*thresholds)


if __name__ == "__main__":
    sys.exit(main())
