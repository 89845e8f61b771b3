"""``bass-jax sweep``: runs an experiment at every point of a grid."""

import argparse

from bass_jax.cli.arguments import add_all, argument, read_overrides
from bass_jax.cli.output import Output
from bass_jax.cli.run import add_run_arguments, check_code_execution, command_of, score_samples

EXAMPLES = """examples:
  bass-jax sweep configs/quickstart.yaml --grid methods.batched.draft_len=1,2,4 --grid methods.batched.batch=1,4
  bass-jax sweep configs/bass/latency.yaml --grid pair.draft=bass-draft-a-310m,bass-draft-b-510m --ray --gpus 1
The same command resumes an interrupted sweep."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run_arguments(parser)
    help = "values of a key, of which all combinations are run; a YAML list can be a value"
    add_all(parser, argument("--grid", help, [], required=True, metavar="PATH=VALUE,VALUE"))
    add_all(
        parser.add_argument_group("several devices or machines"),
        argument("--ray", "run the points as Ray tasks", False),
        argument("--address", "of a Ray cluster (default: this machine)"),
        argument("--cpus", "cores per point", 1.0),
        argument("--gpus", "devices per point", 0.0),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Runs all points, scores them and prints their directories; returns the exit code."""
    overrides = read_overrides(options.overrides)
    grid = dict(_read_grid(text) for text in options.grid)

    from bass_jax.experiments.sweep import make_grid, run_sweep, run_sweep_with_ray
    from bass_jax.runtime.progress import ProgressBars

    check_code_execution(options)
    points, command = make_grid(options.config, grid, overrides), command_of(options)
    with ProgressBars(is_shown=not options.quiet) as bars:
        if options.ray:
            directories = run_sweep_with_ray(
                points,
                command=command,
                address=options.address,
                cpus=options.cpus,
                gpus=options.gpus,
                on_point=lambda _, point: bars.begin(f"{point.config.title}: done"),
            )
        else:
            directories = run_sweep(
                points,
                command=command,
                on_progress=lambda *state: bars.update("batches", *state),
                on_point=lambda index, point: bars.begin(f"{index + 1} of {len(points)}: {point.config.title}"),
            )
        for directory in directories:
            score_samples(directory, options, bars)
    out.value("directories", [str(directory) for directory in directories])
    for directory in directories:
        out.note(str(directory))
    return 0


def _read_grid(text: str) -> tuple[str, list]:
    import yaml

    path, separator, values = text.partition("=")
    if not separator or not path or not values:
        raise ValueError(f"--grid {text!r}: expected PATH=VALUE,VALUE")
    try:
        return path, yaml.safe_load(values if values.startswith("[") else f"[{values}]")
    except yaml.YAMLError:
        raise ValueError(f"--grid {text!r}: the values are not YAML") from None
