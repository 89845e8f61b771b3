"""``bass-jax compare``: compares two runs."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import argument, declare, make_table, output_console

EXAMPLES = """examples:
  bass-jax compare runs/quickstart runs/heuristic"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    declare(
        parser,
        argument("first", "run directory", type=Path, metavar="DIR"),
        argument("second", "another run directory", type=Path, metavar="DIR"),
    )


def run(options: argparse.Namespace) -> int:
    """Prints the differences; returns the exit code."""
    from bass_jax.experiments.compare import compare_runs

    found = compare_runs(options.first, options.second)
    out = output_console()
    if found.differences:
        rows = [(name, str(here), str(there)) for name, (here, there) in found.differences.items()]
        out.print(make_table(("key", str(options.first), str(options.second)), rows, "configurations", num_left=3))
    else:
        out.print("The configurations are the same.")
    rows = []
    for one in found.variants:
        label = one.first if one.first == one.second else f"{one.second} over {one.first}"
        tests = ", ".join(f"{name} {test.p_value:.2g}" for name, test in one.tests.items()) or "–"
        ratios = ["–" if x is None else f"{x:.2f}x" for x in (one.latency_ratio, one.throughput_ratio)]
        rows.append((label, *ratios, "{} of {}".format(*one.num_identical), tests))
    columns = ("", "PTL all, speed-up", "tokens/s, ratio", "identical samples", "same distribution, p-value")
    out.print(make_table(columns, rows, "the second run relative to the first"))
    return 0
