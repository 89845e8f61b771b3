"""Shows how far a run is, in a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bass_jax.experiments.runner import RunProgress
from bass_jax.experiments.scoring import ScoreProgress


class ExperimentProgress:
    """A bar for decoding and one for scoring, each with the time that is left."""

    def __init__(self, *, is_shown: bool = True):
        """Args: is_shown: draw at all; batch systems want no bars."""
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn(),
            console=Console(stderr=True), disable=not is_shown,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._has_started = False

    def __enter__(self) -> "ExperimentProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._has_started:  # Stopping writes a line even so.
            self._bars.stop()

    def decoded(self, line: RunProgress) -> None:
        """Shows the decoding."""
        note = f"{line.batch.variant.label}: {line.tokens_per_second:.0f} tokens/s"
        self._show("batches", line.num_done, line.num_batches, note)

    def scored(self, line: ScoreProgress) -> None:
        """Shows the scoring."""
        self._show("scores", line.num_done, line.num_samples, "")

    def note(self, text: str) -> None:
        """Writes a line above the bars, and begins new ones."""
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()
        if not self._bars.disable:
            self._bars.console.print(text, highlight=False)

    def _show(self, name: str, completed: int, total: int, note: str) -> None:
        if name not in self._tasks:
            self._bars.start()
            self._has_started = True
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
        self._bars.update(self._tasks[name], completed=completed, total=total, note=note)
