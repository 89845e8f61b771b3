"""``bass-jax run``: an experiment, from its configuration to its scores."""

import argparse
import sys
from pathlib import Path

from bass_jax.cli.overrides import read_overrides

EXAMPLES = """examples:
  bass-jax run configs/quickstart.yaml
  bass-jax run configs/quickstart/humaneval.yaml task.data=data/HumanEval.jsonl.gz --allow-code-execution
  bass-jax run configs/quickstart/humaneval.yaml task.limit=4 'methods.batched.policy=bass_heuristic(limit=8)' \\
      output_dir=runs/heuristic
  bass-jax run configs/bass/humaneval.yaml --distributed --quiet      # on every host of a job
an interrupted run goes on where it was: run the same command again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="keys of the configuration, overridden")
    add_common_arguments(parser)
    several = parser.add_argument_group("several processes")
    several.add_argument("--distributed", action="store_true", help="share the batches, as one process of a job")
    several.add_argument("--coordinator", help="HOST:PORT of the first, where the job does not say")
    several.add_argument("--num-processes", type=int, help="likewise")
    several.add_argument("--process", type=int, help="likewise, this one's number, from 0")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what runs and sweeps have in common."""
    parser.add_argument(
        "--allow-code-execution", action="store_true",
        help="run programs that the model wrote, isolated, to score them",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Runs, scores and prints the directory and a table; returns the exit code."""
    overrides = read_overrides(options.overrides)
    if options.distributed:
        import jax

        jax.distributed.initialize(options.coordinator, options.num_processes, options.process)

    from bass_jax.cli.run_progress import ExperimentProgress
    from bass_jax.experiments.experiment_config import load_experiment
    from bass_jax.experiments.runner import run_experiment

    config = load_experiment(options.config, overrides)
    if options.allow_code_execution:
        from bass_jax.experiments.sandbox import check_sandbox

        check_sandbox()
    with ExperimentProgress(is_shown=not options.quiet) as progress:
        directory = run_experiment(config, command=command_of(options), on_progress=progress.decoded)
        if options.distributed and not _is_last():
            return 0
        score(directory, options, progress)
    if not options.quiet:
        _print_table(directory)
    print(directory)
    return 0


def command_of(options: argparse.Namespace) -> list[str]:
    """Returns the command line as a user would type it."""
    return ["bass-jax", *options.arguments]


def score(directory: Path, options: argparse.Namespace, progress) -> None:
    """Scores a run, or says why not."""
    from bass_jax.experiments.scoring import PermissionNeededError, score_run

    try:
        score_run(directory, allow_code_execution=options.allow_code_execution, on_progress=progress.scored)
    except PermissionNeededError as error:
        print(f"bass-jax {options.command}: {error}", file=sys.stderr)


def _is_last() -> bool:
    """Waits for the other processes; the first then scores what all have written."""
    import jax
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("decoded")
    return jax.process_index() == 0


def _print_table(directory: Path) -> None:
    from rich.table import Table

    from bass_jax.cli.output import output_console
    from bass_jax.experiments.results import analyse
    from bass_jax.experiments.run_directory import read_run

    result = analyse(read_run(directory))
    variants = list(result.variants.values())
    measures = {
        "PTL first, ms": ("ptl_first", ".1f", 1e3), "PTL last, ms": ("ptl_last", ".1f", 1e3),
        "PTL all, ms": ("ptl_all", ".1f", 1e3), "speed-up (PTL all)": ("speed_up", ".2f", 1.0),
        "tokens/s": ("tokens_per_second", ".0f", 1.0), "tokens per target pass": ("block_efficiency", ".2f", 1.0),
        "acceptance": ("acceptance", ".0%", 1.0),
    }  # fmt: skip
    table = Table(title=result.run.config.title or str(directory))
    for name in ("", *result.variants):
        table.add_column(name, justify="right" if name else "left")
    for title, (name, spec, scale) in measures.items():
        found = [one.measures.get(name) for one in variants]
        if any(found):
            table.add_row(title, *("–" if one is None else f"{scale * one.value:{spec}}" for one in found))
    table.add_section()
    for name in dict.fromkeys(name for one in variants for name in one.scores):
        table.add_row(name, *(f"{one.scores[name].value:.1%}" if name in one.scores else "–" for one in variants))
    out = output_console()
    out.print(table)
    for label, (num, total) in result.num_identical.items():
        out.print(f"{label}: {num} of {total} greedy samples are those of regular decoding.", highlight=False)
