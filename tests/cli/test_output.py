"""What commands print: tables in terminals, files and pipes, and one JSON object with ``--json``."""

import json

import numpy as np

from bass_jax.cli.output import FILE_WIDTH, Output, cell, output_console


def test_a_file_or_a_pipe_has_a_fixed_width(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    console = output_console()
    assert console.width == FILE_WIDTH
    console.print("x" * FILE_WIDTH)
    assert capsys.readouterr().out == "x" * FILE_WIDTH + "\n"
    monkeypatch.setenv("COLUMNS", "70")
    assert output_console().width == 70


def print_all(out: Output) -> None:
    rows = [("[a]", cell(0.5, ".0%")), ("b", cell(float("nan"), ".0%")), ("c", cell(None, ".2f", " ms"))]
    rows.append(("d", cell(np.float32(0.25), ".2f")))
    out.table(("", "share"), rows, "title")
    out.note("a note")
    out.value("directory", "runs/x")
    out.finish()


def test_a_missing_number_is_a_dash(capsys):
    print_all(Output("run"))
    printed = capsys.readouterr().out
    assert "50%" in printed and printed.count("–") == 2 and "nan" not in printed
    assert "[a]" in printed, "brackets are not markup"
    assert "a note" in printed and "runs/x" not in printed


def test_json_holds_numbers_instead_of_texts(capsys):
    print_all(Output("run", is_json=True))
    rows = [{"name": "[a]", "share": 0.5}, {"name": "b", "share": None}, {"name": "c", "share": None}]
    rows.append({"name": "d", "share": 0.25})
    expected = {"command": "run", "directory": "runs/x", "tables": [{"title": "title", "rows": rows}]}
    assert json.loads(capsys.readouterr().out) == expected | {"notes": ["a note"]}
