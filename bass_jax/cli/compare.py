"""``bass-jax compare``: compares two runs."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import add_all, argument
from bass_jax.cli.output import Cell, Output, cell

EXAMPLES = """examples:
  bass-jax compare runs/quickstart runs/heuristic"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("first", "run directory", type=Path, metavar="DIR"),
        argument("second", "another run directory", type=Path, metavar="DIR"),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Prints the differences; returns the exit code."""
    from bass_jax.experiments.compare import compare_runs

    differences, variants = compare_runs(options.first, options.second)
    if differences:
        rows = [(name, *(Cell(one, str(one)) for one in both)) for name, both in differences.items()]
        out.table(("key", str(options.first), str(options.second)), rows, "configurations", num_left=3)
    else:
        out.note("The configurations are the same.")
    rows = []
    for label, latency, throughput, num_identical, tests in variants:
        p_values = {name: test.p_value for name, test in tests.items()}
        ratios = (cell(latency, ".2f", "x"), cell(throughput, ".2f", "x"))
        tested = ", ".join(f"{name} {p_value:.2g}" for name, p_value in p_values.items())
        identical = Cell(num_identical, "{} of {}".format(*num_identical))
        rows.append((label, *ratios, identical, Cell(p_values, tested or "–")))
    columns = ("", "PTL all, speed-up", "tokens/s, ratio", "identical samples", "same distribution, p-value")
    out.table(columns, rows, "the second run relative to the first")
    return 0
