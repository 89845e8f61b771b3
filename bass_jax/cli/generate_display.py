"""What ``bass-jax generate`` shows: progress, live rows, the closing table."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from bass_jax.decoding.metrics import summarize
from bass_jax.decoding.outputs import Generation, StreamEvent
from bass_jax.decoding.state import StepInfo
from bass_jax.runtime.progress import LiveView

LIVE_LINES = 2
"""Lines of its newest text that each row shows while it runs."""

MAX_LIVE_ROWS = 16
"""Batches of more rows show the bar alone."""


class Display(LiveView):
    """A progress bar, and under it the newest text of every row of the batch, redrawn as tokens are accepted."""

    def __init__(self, console: Console, name: str, num_rows: int, *, is_shown: bool):
        """Starts with no rows done.

        Args:
            console: terminal to draw on.
            name: of the bar.
            num_rows: of all batches.
            is_shown: False draws nothing.
        """
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} rows"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(name, total=num_rows, note="")
        self._seconds, self._num_emitted, self._num_drafted, self._num_accepted = 0.0, 0, 0, 0
        self._width = max(20, console.width - 8)
        self._texts: list[str] = []
        self._marks: list[str] = []
        super().__init__(console, is_shown=is_shown)

    def __rich__(self) -> Group:
        rows = Table.grid(padding=(0, 1))
        for index, (mark, content) in enumerate(zip(self._marks, self._texts, strict=True)):
            rows.add_row(f"{index:>3} {mark}", Text(" ".join(content.split())[-LIVE_LINES * self._width :]))
        return Group(self._progress, rows)

    def begin(self, num_rows: int) -> None:
        """Starts a batch; large ones show the bar alone."""
        num_shown = num_rows if num_rows <= MAX_LIVE_ROWS else 0
        self._texts, self._marks = [""] * num_shown, ["…"] * num_shown

    def push(self, event: StreamEvent) -> None:
        """Appends what a row emitted."""
        is_finished = event.finish_reason is not None
        if event.row < len(self._texts):
            self._texts[event.row] += event.text
            self._marks[event.row] = "✓" if is_finished else "…"
        if is_finished:
            self._progress.advance(self._task)

    def count(self, info: StepInfo, seconds: float) -> None:
        """Adds a step to the rates beside the bar."""
        self._seconds += seconds
        self._num_emitted += int(info.num_emitted.sum())
        self._num_drafted += int(info.num_drafted.sum())
        self._num_accepted += int(info.num_accepted.sum())
        accepted = f", {self._num_accepted / self._num_drafted:.0%} accepted" if self._num_drafted else ""
        self._progress.update(self._task, note=f"{self._num_emitted / self._seconds:.1f} tokens/s{accepted}")


def print_texts(
    console: Console, prompts: Sequence[str], texts: Sequence[str], num_samples: int, *, is_plain: bool
) -> None:
    """Prints the answers, each prompt's beginning as a rule above its own unless `is_plain`."""
    if is_plain:
        for text in texts:
            console.print(Text(text.strip()), soft_wrap=True)
        return
    for index, text in enumerate(texts):
        if index % num_samples == 0:
            lines = [line for line in prompts[index // num_samples].splitlines() if line.strip("` ")]
            title = lines[-1] if len(lines) == 1 else f"{lines[0]} …"
            console.rule(Text(title[:100]), align="left")
        console.print(Text(text.strip()))
    console.print()


def results_table(runs: Sequence[tuple[str, Sequence[Generation]]]) -> Table:
    """A column per run: the measures of the papers, and the speed-up over the last run, the baseline."""
    table = Table(title="decoding, compilation and prefill left out")
    table.add_column("")
    for name, _ in runs:
        table.add_column(name, justify="right")
    measures = {name: measure(batches) for name, batches in runs}
    for label in next(iter(measures.values())):
        table.add_row(label, *(measures[name][label] for name, _ in runs))
    if len(runs) > 1:
        baseline = _tokens_per_second(runs[-1][1])
        table.add_section()
        table.add_row("speed-up", *(f"{_tokens_per_second(batches) / baseline:.2f}x" for _, batches in runs))
    return table


def measure(batches: Sequence[Generation]) -> dict[str, str]:
    """The measures of one run, added up over its batches."""
    total = summarize([info for batch in batches for info in batch.infos])

    def latency(name: str) -> str:
        values = [getattr(batch.latency, name) for batch in batches]
        return f"{1e3 * sum(values) / len(values):.1f} ms"

    by_position = " ".join(f"{rate:.0%}" for rate in total.acceptance_by_position)
    return {
        "batch": f"{max(len(batch.tokens) for batch in batches)}",
        "target passes": f"{total.num_steps}",
        "drafted / verified / emitted": f"{total.num_drafted} / {total.num_verified} / {total.num_emitted}",
        "rejected / padded": f"{total.num_rejected} / {total.num_padded}",
        "block efficiency": f"{total.block_efficiency:.2f}",
        "acceptance": f"{total.acceptance_rate:.0%}" if total.num_drafted else "–",
        "acceptance by position": by_position or "–",
        "PTL first": latency("first"),
        "PTL last": latency("last"),
        "PTL all": latency("all"),
        "tokens/s": f"{_tokens_per_second(batches):.1f}",
        "prefill": f"{sum(batch.timings.prefill for batch in batches):.2f} s",
        "decode": f"{sum(batch.timings.decode for batch in batches):.2f} s",
        "compile": f"{sum(batch.timings.compile for batch in batches):.1f} s "
        f"({sum(batch.timings.num_compiled for batch in batches)} executables)",
    }


def _tokens_per_second(batches: Sequence[Generation]) -> float:
    return sum(batch.summary.num_emitted for batch in batches) / sum(batch.timings.decode for batch in batches)
