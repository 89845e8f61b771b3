"""``bass-jax report``: writes tables and figures of runs as an HTML page and as Markdown."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import add_all, argument
from bass_jax.cli.output import Output

EXAMPLES = """examples:
  bass-jax report runs/quickstart
  bass-jax report runs/quickstart --output quickstart --title "SmolLM2-135M on two cores"
  bass-jax report runs/drafts/* --output drafts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_all(
        parser,
        argument("directories", "run directories", nargs="+", type=Path, metavar="DIR"),
        argument("--output", "path without a suffix (default: report in the first directory)", type=Path),
        argument("--title", "of the report (default: the first run's)", ""),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Writes the report and prints its paths; returns the exit code."""
    from bass_jax.experiments.render import write_report
    from bass_jax.experiments.report import make_report

    output = options.output or options.directories[0] / "report"
    paths = write_report(make_report(options.directories, output, options.title), output)
    out.value("paths", [str(path) for path in paths])
    for path in paths:
        out.note(str(path))
    return 0
