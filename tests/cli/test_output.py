"""Tables in files and pipes.

What breaking it means: a batch job's log whose columns were squeezed away for a terminal that was never there.
"""

from bass_jax.cli.output import FILE_WIDTH, output_console


def test_what_is_no_terminal_has_columns_of_its_own(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    console = output_console()
    assert console.width == FILE_WIDTH
    console.print("x" * FILE_WIDTH)
    assert capsys.readouterr().out == "x" * FILE_WIDTH + "\n"
    monkeypatch.setenv("COLUMNS", "70")
    assert output_console().width == 70
