"""``bass-jax report``: tables and figures of runs, as one page and as Markdown."""

import argparse
from pathlib import Path

EXAMPLES = """examples:
  bass-jax report runs/quickstart
  bass-jax report runs/quickstart --output quickstart --title "SmolLM2-135M on two cores"
  bass-jax report runs/drafts/* --output drafts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="run directories")
    parser.add_argument("--output", type=Path, help="path without an ending (default: report in the first directory)")
    parser.add_argument("--title", default="", help="of the report (default: the first run's)")


def run(options: argparse.Namespace) -> int:
    """Writes the report and prints where; returns the exit code."""
    from bass_jax.experiments.render import write_report
    from bass_jax.experiments.report import make_report

    output = options.output or options.directories[0] / "report"
    for path in write_report(make_report(options.directories, output, options.title), output):
        print(path)
    return 0
