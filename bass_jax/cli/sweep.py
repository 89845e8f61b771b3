"""``bass-jax sweep``: a grid over an experiment."""

import argparse
from pathlib import Path

from bass_jax.cli.overrides import read_overrides
from bass_jax.cli.run import add_common_arguments, command_of, score

EXAMPLES = """examples:
  bass-jax sweep configs/quickstart.yaml --grid methods.batched.draft_len=1,2,4 --grid methods.batched.batch=1,4
  bass-jax sweep configs/bass/drafts.yaml --grid pair.draft=bass-draft-a-310m,bass-draft-b-510m --ray --gpus 1
an interrupted sweep goes on where it was: run the same command again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="PATH=VALUE", help="keys of the configuration, overridden")
    parser.add_argument(
        "--grid", action="append", default=[], required=True, metavar="PATH=VALUE,VALUE",
        help="values of a key; may be repeated, all combinations are run. A YAML list may hold commas itself",
    )  # fmt: skip
    add_common_arguments(parser)
    ray = parser.add_argument_group("several devices or machines")
    ray.add_argument("--ray", action="store_true", help="run the points as Ray tasks")
    ray.add_argument("--address", help="of a Ray cluster (default: this machine)")
    ray.add_argument("--cpus", type=float, default=1.0, help="cores per point (default: %(default)s)")
    ray.add_argument("--gpus", type=float, default=0.0, help="devices per point (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Runs all points, scores them and prints their directories; returns the exit code."""
    overrides = read_overrides(options.overrides)
    grid = dict(_read_grid(text) for text in options.grid)

    from bass_jax.cli.run_progress import ExperimentProgress
    from bass_jax.experiments.sandbox import check_sandbox
    from bass_jax.experiments.sweep import make_grid, run_sweep, run_sweep_with_ray

    if options.allow_code_execution:
        check_sandbox()
    points = make_grid(options.config, grid, overrides)
    command = command_of(options)
    with ExperimentProgress(is_shown=not options.quiet) as progress:
        if options.ray:
            directories = run_sweep_with_ray(
                points, command=command, address=options.address, cpus=options.cpus, gpus=options.gpus,
                on_point=lambda _, point: progress.note(f"{point.config.title}: done"),
            )  # fmt: skip
        else:
            directories = run_sweep(
                points, command=command, on_progress=progress.decoded,
                on_point=lambda index, point: progress.note(f"{index + 1} of {len(points)}: {point.config.title}"),
            )  # fmt: skip
        for directory in directories:
            score(directory, options, progress)
    for directory in directories:
        print(directory)
    return 0


def _read_grid(text: str) -> tuple[str, list]:
    import yaml

    path, separator, values = text.partition("=")
    if not separator or not path or not values:
        raise ValueError(f"--grid {text!r}: expected PATH=VALUE,VALUE")
    try:
        found = yaml.safe_load(values if values.startswith("[") else f"[{values}]")
    except yaml.YAMLError:
        raise ValueError(f"--grid {text!r}: the values are not YAML") from None
    return path, found
