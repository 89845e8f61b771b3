"""``bass-jax distill``: trains a draft for a target on the target's own answers."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bass_jax.cli.arguments import read_overrides
from bass_jax.cli.output import Cell, Output

if TYPE_CHECKING:
    from bass_jax.training import Agreement

STAGES = ("corpus", "train", "evaluate")

EXAMPLES = """examples:
  bass-jax distill configs/distill/smollm2_quickstart.yaml --set prompts.options.data_dir=data
  bass-jax distill configs/distill/smollm2_quickstart.yaml --set training.num_steps=200 --set output_dir=runs/short
  bass-jax distill configs/distill/smollm2_quickstart.yaml --stages evaluate
  bass-jax distill configs/distill/smollm2_corpus.yaml --stages corpus      # for several drafts
The same command continues an interrupted run. docs/how_to/draft_training.md has a configuration for your own target."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a key; may be repeated"
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="which to run (default: all)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--plot", type=Path, help="plot the log of the training to this file; needs matplotlib")


def run(options: argparse.Namespace, out: Output) -> int:
    """Distills a draft and prints its agreement with the target and its path; returns the exit code."""
    from bass_jax.training import distill, generate_corpus, load_distill_config

    config = load_distill_config(options.config, read_overrides(options.set, "--set "))
    if tuple(options.stages) == ("corpus",):
        directory = generate_corpus(config, show_progress=not options.quiet).directory
        out.value("directory", str(directory))
        out.note(str(directory))
        return 0
    distilled = distill(config, stages=options.stages, show_progress=not options.quiet)
    if distilled.agreements:
        print_agreements(out, distilled.agreements, distilled.acceptances)
    out.value("directory", str(distilled.directory))
    out.note(str(distilled.directory))
    if options.plot is not None:
        from bass_jax.cli.plots import plot_training

        out.note(plot_training(distilled.directory.parent / "metrics.jsonl", options.plot))
    return 0


def print_agreements(
    out: Output,
    agreements: "Mapping[str, Agreement]",
    acceptances: Mapping[str, Mapping[float, float]] | None = None,
) -> None:
    """Prints agreement, tokens per target pass and acceptance of sampled answers, a row per domain."""
    names = next(iter(agreements.values()))._fields
    temperatures = sorted({temperature for found in (acceptances or {}).values() for temperature in found})
    columns = ("domain", *names, *(f"acceptance at {temperature:g}" for temperature in temperatures))
    rows = []
    for domain, agreement in agreements.items():
        sampled = [(acceptances or {}).get(domain, {}).get(temperature) for temperature in temperatures]
        cells = (*agreement, *sampled)
        texts = ("" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells)
        rows.append((domain, *map(Cell, cells, texts)))
    out.table([name.replace("_", " ") for name in columns], rows, "held-out prompts, temperature 0")
