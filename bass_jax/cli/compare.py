"""``bass-jax compare``: two runs side by side."""

import argparse
from pathlib import Path

EXAMPLES = """examples:
  bass-jax compare runs/quickstart runs/heuristic"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("first", type=Path, metavar="DIR", help="a run directory")
    parser.add_argument("second", type=Path, metavar="DIR", help="another")


def run(options: argparse.Namespace) -> int:
    """Prints what differs; returns the exit code."""
    from rich.table import Table

    from bass_jax.cli.output import output_console
    from bass_jax.experiments.compare import compare_runs

    found = compare_runs(options.first, options.second)
    out = output_console()
    settings = Table(title="configurations")
    for name in ("key", str(options.first), str(options.second)):
        settings.add_column(name)
    for name, (here, there) in found.differences.items():
        settings.add_row(name, str(here), str(there))
    out.print(settings if found.differences else "The configurations are the same.")
    table = Table(title="the second run over the first")
    for name in ("", "PTL all, speed-up", "tokens/s, ratio", "identical samples", "same distribution? p"):
        table.add_column(name, justify="right" if name else "left")
    for one in found.variants:
        label = one.first if one.first == one.second else f"{one.second} over {one.first}"
        tests = ", ".join(f"{name} {test.p_value:.2g}" for name, test in one.tests.items())
        num, total = one.num_identical
        table.add_row(label, _ratio(one.latency_ratio), _ratio(one.throughput_ratio), f"{num} of {total}", tests or "–")
    out.print(table)
    return 0


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"
