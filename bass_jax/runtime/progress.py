"""The progress displays of commands: bars, and views that are redrawn while a command works."""

import abc

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class LiveView(abc.ABC):
    """A view that is redrawn several times per second while its ``with`` block runs."""

    def __init__(self, console: Console, *, is_shown: bool):
        """Makes a view on `console`; it draws nothing if `is_shown` is False."""
        self._live = Live(self, console=console, refresh_per_second=8, transient=True) if is_shown else None

    def __enter__(self):
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._live is not None:
            self._live.stop()

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """Returns the current content."""


class ProgressBars:
    """Progress bars on standard error, one per name, with a note, the elapsed time and the remaining time.

    A bar appears with its first update.
    """

    def __init__(self, *, is_shown: bool = True):
        """Makes no bars yet; none are ever drawn if `is_shown` is False."""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not is_shown,
        )
        self._tasks: dict[str, TaskID] = {}
        self._is_started = False

    def __enter__(self) -> "ProgressBars":
        return self

    def __exit__(self, *exception) -> None:
        if self._is_started:  # Stopping prints a line even without bars.
            self._bars.stop()

    def update(self, name: str, num_done: int, total: int, note: str = "") -> None:
        """Sets the state of the bar `name`."""
        if name not in self._tasks:
            self._bars.start()
            self._is_started = True
            self._tasks[name] = self._bars.add_task(name, note="")
        self._bars.update(self._tasks[name], completed=num_done, total=total, note=note)

    def begin(self, title: str) -> None:
        """Removes the bars and prints a line above those that follow."""
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()
        if not self._bars.disable:
            self._bars.console.print(title, highlight=False)
