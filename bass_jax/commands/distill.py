"""``bass-jax distill``: a draft for a target, from the target's own outputs."""

import argparse
from pathlib import Path

from bass_jax.commands.overrides import read_overrides

STAGES = ("corpus", "train", "evaluate")

EXAMPLES = """examples:
  bass-jax distill configs/distill/smollm2_quickstart.yaml --set prompts.data_dir=data
  bass-jax distill configs/distill/smollm2_quickstart.yaml --set training.num_steps=200 --set output_dir=runs/short
  bass-jax distill configs/distill/smollm2_quickstart.yaml --stages evaluate
an interrupted run goes on where it was: run the same command again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a key; may be repeated"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="which to run (default: all)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Distils and prints where the draft lies and how often the target agrees with it; returns the exit code."""
    overrides = read_overrides(options.set, "--set ")

    from rich.console import Console
    from rich.table import Table

    from bass_jax.training import run_distill

    distilled = run_distill(options.config, overrides, stages=tuple(options.stages), show_progress=not options.quiet)
    if distilled.agreements:
        table = Table(title="held-out prompts, temperature 0")
        names = next(iter(distilled.agreements.values()))._fields
        for name in ("domain", *names):
            table.add_column(name.replace("_", " "), justify="right")
        for domain, agreement in distilled.agreements.items():
            table.add_row(domain, *(f"{x:.3g}" if isinstance(x, float) else str(x) for x in agreement))
        Console().print(table)
    print(distilled.directory)
    return 0
