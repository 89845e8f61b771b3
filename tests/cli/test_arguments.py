"""The declaration of arguments, and tables in files and pipes."""

import argparse
from pathlib import Path

from bass_jax.cli.arguments import FILE_WIDTH, add_all, argument, make_table, numbers, output_console


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


def test_tables_align_their_first_columns_left():
    columns = make_table(("name", "value"), [("a", "1")]).columns
    assert [column.justify for column in columns] == ["left", "right"]


def test_a_file_or_a_pipe_has_a_fixed_width(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    console = output_console()
    assert console.width == FILE_WIDTH
    console.print("x" * FILE_WIDTH)
    assert capsys.readouterr().out == "x" * FILE_WIDTH + "\n"
    monkeypatch.setenv("COLUMNS", "70")
    assert output_console().width == 70
