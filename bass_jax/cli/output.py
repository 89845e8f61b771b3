"""What commands print: text and tables, or with ``--json`` one JSON object."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FILE_WIDTH = 160
"""Columns of a table that is written to a file or a pipe."""

_MIN_WIDTH = 5
"""Columns of a right-aligned column, so that numbers are not broken in a narrow terminal."""


class Cell(NamedTuple):
    """A value in a table."""

    value: Any  # in JSON
    text: str  # in a table


def cell(value: Any, spec: str = "", unit: str = "") -> Cell:
    """Returns a number, NumPy's or Python's, formatted by `spec` with a unit; a dash for None and NaN."""
    value = getattr(value, "item", lambda: value)()  # NumPy's numbers are not JSON
    is_missing = value is None or value != value
    return Cell(None if is_missing else value, "–" if is_missing else f"{value:{spec}}{unit}")


class Output:
    """Prints the results of a command.

    With ``--json`` nothing is printed before `finish`. It prints an object with the values, the tables and the notes.
    """

    def __init__(self, command: str, *, is_json: bool = False):
        """Prints nothing yet."""
        self.is_json = is_json
        self._values: dict[str, Any] = {"command": command}
        self._tables: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._console: Console | None = None

    @property
    def console(self) -> "Console":
        """A console on standard output."""
        if self._console is None:
            self._console = output_console()
        return self._console

    def value(self, name: str, value: Any) -> None:
        """Adds a value to the JSON object."""
        self._values[name] = value

    def show(self, *parts: "RenderableType", soft_wrap: bool = False) -> None:
        """Prints what is for readers alone, such as a bar chart."""
        if not self.is_json:
            self.console.print(*parts, soft_wrap=soft_wrap, highlight=False)

    def note(self, text: str) -> None:
        """Prints a line of text, which is not broken."""
        self._notes.append(text)
        if not self.is_json:
            self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str | Cell]], title: str = "", num_left: int = 1
    ) -> None:
        """Prints a table whose first `num_left` columns are left-aligned.

        In JSON each row is an object. The key of a column without a title is ``"name"``.
        """
        rows = [[one if isinstance(one, Cell) else Cell(one, one) for one in row] for row in rows]
        names = [column or "name" for column in columns]
        records = [dict(zip(names, (one.value for one in row), strict=True)) for row in rows]
        self._tables.append({"title": title, "rows": records})
        if self.is_json:
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title) if title else None)
        for index, name in enumerate(columns):
            if index < num_left:
                table.add_column(name, overflow="fold", no_wrap=index == 0)
            else:
                table.add_column(name, justify="right", min_width=_MIN_WIDTH)
        for row in rows:
            table.add_row(*(Text(one.text) for one in row))
        self.console.print(table)

    def write(self, path: Path, text: str) -> None:
        """Writes the file of ``--output`` and prints its path.

        Raises:
            ValueError: if it cannot be written.
        """
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--output {path}: cannot be written: {error.strerror}") from None
        self.note(f"written: {path}")

    def finish(self) -> None:
        """Prints the JSON object."""
        if self.is_json:
            from bass_jax.runtime.files import finite

            content = finite(self._values | {"tables": self._tables, "notes": self._notes})
            print(json.dumps(content, indent=1, ensure_ascii=False, default=_as_json))


def _as_json(value: Any) -> Any:
    """Returns an array as a list, and a path as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def output_console() -> "Console":
    """Returns a console on standard output. COLUMNS overrides the width of a file or a pipe."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=FILE_WIDTH)
    return console
