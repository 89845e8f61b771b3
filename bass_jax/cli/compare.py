"""``bass-jax compare``: compares two runs."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import add_all, argument, make_table, output_console

EXAMPLES = """examples:
  bass-jax compare runs/quickstart runs/heuristic"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("first", "run directory", type=Path, metavar="DIR"),
        argument("second", "another run directory", type=Path, metavar="DIR"),
    )


def run(options: argparse.Namespace) -> int:
    """Prints the differences; returns the exit code."""
    from bass_jax.experiments.compare import compare_runs

    differences, variants = compare_runs(options.first, options.second)
    out = output_console()
    if differences:
        rows = [(name, str(here), str(there)) for name, (here, there) in differences.items()]
        out.print(make_table(("key", str(options.first), str(options.second)), rows, "configurations", num_left=3))
    else:
        out.print("The configurations are the same.")
    rows = []
    for label, latency, throughput, num_identical, tests in variants:
        p_values = ", ".join(f"{name} {test.p_value:.2g}" for name, test in tests.items()) or "–"
        ratios = ("–" if latency is None else f"{latency:.2f}x", f"{throughput:.2f}x")
        rows.append((label, *ratios, "{} of {}".format(*num_identical), p_values))
    columns = ("", "PTL all, speed-up", "tokens/s, ratio", "identical samples", "same distribution, p-value")
    out.print(make_table(columns, rows, "the second run relative to the first"))
    return 0
