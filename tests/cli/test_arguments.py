"""The declaration of arguments."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import add_all, argument, numbers


def test_the_type_of_an_argument_follows_from_its_default():
    parser = argparse.ArgumentParser()
    add_all(
        parser,
        argument("--length", "", 4),
        argument("--share", "", 0.5),
        argument("--path", "", Path("a")),
        argument("--flag", "", False),
        argument("--stop", "", []),
        argument("--sizes", "", "1,2", type=numbers),
    )
    found = parser.parse_args(["--length", "8", "--path", "b", "--flag", "--stop", "x", "--stop", "y"])
    assert vars(found) == {
        "length": 8,
        "share": 0.5,
        "path": Path("b"),
        "flag": True,
        "stop": ["x", "y"],
        "sizes": [1, 2],
    }
    assert "(default: 0.5)" in parser.format_help()
