"""``bass-jax run``: runs an experiment and scores it."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bass_jax.cli.arguments import QUIET, add_all, add_process_arguments, argument, read_overrides
from bass_jax.cli.output import Output, cell

if TYPE_CHECKING:
    from bass_jax.runtime.progress import ProgressBars

EXAMPLES = """examples:
  bass-jax run configs/quickstart.yaml
  bass-jax run configs/quickstart/humaneval.yaml --allow-code-execution
  bass-jax run configs/quickstart/humaneval.yaml task.limit=4 'methods.batched.policy=bass_heuristic(limit=8)' \\
      output_dir=runs/heuristic
  bass-jax run configs/bass/humaneval.yaml --distributed --quiet      # on every host of a job
The same command resumes an interrupted run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run_arguments(parser)
    add_process_arguments(parser, "share the batches")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that runs and sweeps share."""
    add_all(
        parser,
        argument("config", "YAML file", type=Path),
        argument("overrides", "overrides of keys of the configuration", nargs="*", metavar="PATH=VALUE"),
        argument("--allow-code-execution", "run programs that the model wrote, isolated, to score them", False),
        argument(
            "--inside-container",
            "run these programs without isolation if bubblewrap cannot be used, because this container is your own",
            False,
        ),
        QUIET,
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Runs, scores and prints the directory and a table; returns the exit code."""
    overrides = read_overrides(options.overrides)
    if options.distributed:
        import jax

        jax.distributed.initialize(options.coordinator, options.num_processes, options.process)

    from bass_jax.experiments.experiment_config import load_experiment
    from bass_jax.experiments.runner import run_experiment
    from bass_jax.runtime.progress import ProgressBars

    config = load_experiment(options.config, overrides)
    check_code_execution(options)
    with ProgressBars(is_shown=not options.quiet) as bars:
        directory = run_experiment(
            config, command=command_of(options), on_progress=lambda *state: bars.update("batches", *state)
        )
        if options.distributed and not _is_first():
            return 0
        score_samples(directory, options, bars)
    if not options.quiet:
        _print_results(out, directory)
    out.value("directory", str(directory))
    out.note(str(directory))
    return 0


def command_of(options: argparse.Namespace) -> list[str]:
    """Returns the command line as a user would type it."""
    return ["bass-jax", *options.arguments]


def check_code_execution(options: argparse.Namespace) -> None:
    """Checks before a run that its programs can be isolated, if they may be executed."""
    if options.allow_code_execution:
        from bass_jax.experiments.sandbox import run_program

        run_program("", inside_container=options.inside_container)


def score_samples(directory: Path, options: argparse.Namespace, bars: "ProgressBars") -> None:
    """Scores a run, or prints that this needs a permission."""
    from bass_jax.experiments.scoring import PermissionNeededError, score_run

    try:
        score_run(
            directory,
            allow_code_execution=options.allow_code_execution,
            inside_container=options.inside_container,
            on_progress=lambda *state: bars.update("scores", *state),
        )
    except PermissionNeededError as error:
        print(f"bass-jax {options.command}: {error}", file=sys.stderr)


def _is_first() -> bool:
    """Waits for the other processes; returns whether this is the first one, which scores the samples of all."""
    import jax
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("decoded")
    return jax.process_index() == 0


def _print_results(out: Output, directory: Path) -> None:
    from bass_jax.experiments.results import LATENCY, THROUGHPUT, analyze
    from bass_jax.experiments.run_directory import read_run

    result = analyze(read_run(directory))
    variants = list(result.variants.values())
    rows = []
    for title, name, spec, scale in (*LATENCY, *THROUGHPUT):
        found = [one.measures.get(name) for one in variants]
        if any(found):
            rows.append((title, *(cell(None if one is None else scale * one.value, spec) for one in found)))
    for name in dict.fromkeys(name for one in variants for name in one.scores):
        rows.append((name, *(cell(one.scores[name].value if name in one.scores else None, ".1%") for one in variants)))
    out.table(("", *result.variants), rows, result.run.config.title or str(directory))
    for label, (num, total) in result.num_identical.items():
        out.note(f"{label}: {num} of {total} greedy samples equal those of regular decoding.")
