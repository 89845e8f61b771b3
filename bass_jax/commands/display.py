"""What ``bass-jax generate`` shows: progress, live rows, the closing table."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from bass_jax.generate import Generation
from bass_jax.metrics import summarize

LIVE_LINES = 3
"""Lines of its newest text that each row shows while it runs."""


class LiveRows:
    """The newest text of every row, redrawn in a terminal as tokens are accepted."""

    def __init__(self, progress: Progress, num_rows: int):
        """Draws under the bar of `progress`."""
        self._texts = [""] * num_rows
        self._marks = ["…"] * num_rows
        self._progress = progress
        self._width = max(20, progress.console.width - 8)

    def __enter__(self) -> "LiveRows":
        return self

    def __exit__(self, *exception) -> None:
        self._progress.live.update(self._progress.get_renderable())

    def push(self, row: int, text: str, is_finished: bool) -> None:
        """Appends to a row."""
        self._texts[row] += text
        if is_finished:
            self._marks[row] = "✓"
        table = Table.grid(padding=(0, 1))
        for index, (mark, content) in enumerate(zip(self._marks, self._texts, strict=True)):
            tail = " ".join(content.split())[-LIVE_LINES * self._width :]
            table.add_row(f"{index:>3} {mark}", Text(tail))
        self._progress.live.update(Group(self._progress.get_renderable(), table))


def progress_bar(console: Console, *, is_quiet: bool) -> Progress:
    """Rows done, tokens per second, acceptance, time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rows"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=is_quiet,
        transient=True,
    )


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
