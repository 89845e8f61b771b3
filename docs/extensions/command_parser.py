"""The parser of the command line, as the reference shows it."""

import argparse
import textwrap

from bass_jax.cli import main


def parser() -> argparse.ArgumentParser:
    """Returns the parser, with the examples at the end of each help as literal blocks."""
    top = main.parser()
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    for one in (top, *commands.choices.values()):
        one.epilog = one.epilog and ".. code-block:: text\n\n" + textwrap.indent(one.epilog, "    ")
    return top
