"""``bass-jax distill``: a draft for a target, from the target's own outputs."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from bass_jax.training import Agreement

from bass_jax.cli.arguments import read_overrides

STAGES = ("corpus", "train", "evaluate")

EXAMPLES = """examples:
  bass-jax distill configs/distill/smollm2_quickstart.yaml --set prompts.data_dir=data
  bass-jax distill configs/distill/smollm2_quickstart.yaml --set training.num_steps=200 --set output_dir=runs/short
  bass-jax distill configs/distill/smollm2_quickstart.yaml --stages evaluate
  bass-jax distill configs/distill/smollm2_corpus.yaml --stages corpus      # for several drafts
an interrupted run goes on where it was: run the same command again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a key; may be repeated"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="which to run (default: all)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--plot", type=Path, help="draw the training's log; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Distils and prints where the draft lies and how often the target agrees with it; returns the exit code."""
    overrides = read_overrides(options.set, "--set ")

    from bass_jax.training import run_corpus, run_distill

    if tuple(options.stages) == ("corpus",):
        print(run_corpus(options.config, overrides, show_progress=not options.quiet))
        return 0
    distilled = run_distill(options.config, overrides, stages=tuple(options.stages), show_progress=not options.quiet)
    if distilled.agreements:
        from bass_jax.cli.arguments import output_console

        output_console().print(agreement_table(distilled.agreements, distilled.acceptances))
    print(distilled.directory)
    if options.plot is not None:
        from bass_jax.cli.distill_plot import plot_training

        plot_training(distilled.directory.parent / "metrics.jsonl", options.plot)
        print(f"drawn: {options.plot}")
    return 0


def agreement_table(
    agreements: "Mapping[str, Agreement]", acceptances: Mapping[str, Mapping[float, float]] | None = None
) -> "Table":
    """Lays out agreement and block efficiency by domain, and the acceptance of sampled answers."""
    from rich.table import Table

    table = Table(title="held-out prompts, temperature 0")
    names = next(iter(agreements.values()))._fields
    temperatures = sorted({one for found in (acceptances or {}).values() for one in found})
    for name in ("domain", *names, *(f"acceptance at {one:g}" for one in temperatures)):
        table.add_column(name.replace("_", " "), justify="right")
    for domain, agreement in agreements.items():
        sampled = [(acceptances or {}).get(domain, {}).get(one) for one in temperatures]
        cells = (*agreement, *sampled)
        table.add_row(domain, *("" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells))
    return table
