"""Where commands print their results."""

import os

from rich.console import Console

FILE_WIDTH = 160
"""Columns of a table in a file or a pipe, which have no width of their own."""


def output_console() -> Console:
    """Returns standard output; COLUMNS overrides the width of what is no terminal."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=FILE_WIDTH)
    return console
