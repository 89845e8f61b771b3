"""The displays of ``bass-jax generate``: progress with the newest text of each row, and the table of results."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from bass_jax.cli.output import Cell, Output, cell
from bass_jax.config import SpecConfig
from bass_jax.decoding.metrics import summarize
from bass_jax.decoding.outputs import Generation, StreamEvent
from bass_jax.decoding.state import StepInfo
from bass_jax.runtime.progress import LiveView

_LINES_PER_ROW = 2
_MAX_ROWS = 16
"""A batch with more rows is shown by the bar only."""


class GenerateDisplay(LiveView):
    """A progress bar, and below it the newest text of every row of the batch."""

    def __init__(self, console: Console, name: str, num_rows: int, *, is_shown: bool):
        """Makes a display of `num_rows` rows in all batches; it draws nothing if `is_shown` is False."""
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
            rows.add_row(f"{index:>3} {mark}", Text(" ".join(content.split())[-_LINES_PER_ROW * self._width :]))
        return Group(self._progress, rows)

    def begin(self, num_rows: int) -> None:
        """Starts a batch."""
        num_shown = num_rows if num_rows <= _MAX_ROWS else 0
        self._texts, self._marks = [""] * num_shown, ["…"] * num_shown

    def push(self, event: StreamEvent) -> None:
        """Appends the text of an event to its row."""
        is_finished = event.finish_reason is not None
        if event.row < len(self._texts):
            self._texts[event.row] += event.text
            self._marks[event.row] = "✓" if is_finished else "…"
        if is_finished:
            self._progress.advance(self._task)

    def compiling(self, function: Callable, arguments: tuple) -> None:
        """Shows what is compiled, until the next step."""
        self._progress.update(self._task, note=describe_compilation(function, arguments))

    def count(self, info: StepInfo, seconds: float) -> None:
        """Adds a step to the rates next to the bar."""
        self._seconds += seconds
        self._num_emitted += int(info.num_emitted.sum())
        self._num_drafted += int(info.num_drafted.sum())
        self._num_accepted += int(info.num_accepted.sum())
        accepted = f", {self._num_accepted / self._num_drafted:.0%} accepted" if self._num_drafted else ""
        self._progress.update(self._task, note=f"{self._num_emitted / self._seconds:.1f} tokens/s{accepted}")


def describe_compilation(function: Callable, arguments: tuple) -> str:
    """Returns a text such as ``"compiling speculate step, 4 drafts"``."""
    name = getattr(function, "__name__", "a function").strip("_").replace("_", " ")
    lengths = [one.num_drafts for one in arguments if isinstance(one, SpecConfig) and one.num_drafts]
    return f"compiling {name}{f', {lengths[0]} drafts' if lengths else ''}"


def print_texts(
    console: Console, prompts: Sequence[str], texts: Sequence[str], num_samples: int, *, is_plain: bool
) -> None:
    """Prints the outputs; unless `is_plain`, a rule with the beginning of the prompt precedes its outputs."""
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


def print_results(out: Output, runs: Mapping[str, Sequence[Generation]]) -> None:
    """Prints a table with a column per run: the papers' measures, and the speed-up relative to the last run."""
    columns = [_measures(batches) for batches in runs.values()]
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    if len(runs) > 1:
        rates = [_tokens_per_second(batches) for batches in runs.values()]
        rows.append(("speed-up", *(cell(rate / rates[-1], ".2f", "x") for rate in rates)))
    out.table(("", *runs), rows, "times exclude compilation; speeds exclude prefill")


def _measures(batches: Sequence[Generation]) -> dict[str, Cell]:
    """Returns the measures of one run, over all its batches."""
    total = summarize([info for batch in batches for info in batch.infos])
    rates = total.acceptance_by_position  # NaN for a position that no draft reached
    timings = [batch.timings for batch in batches]
    num_compiled = sum(one.num_compiled for one in timings)
    compile_seconds = sum(one.compile for one in timings)

    def latency(name: str) -> Cell:
        return cell(1e3 * sum(getattr(batch.latency, name) for batch in batches) / len(batches), ".1f", " ms")

    def counts(*numbers: int) -> Cell:
        return Cell(numbers, " / ".join(map(str, numbers)))

    return {
        "batch": cell(max(len(batch.tokens) for batch in batches)),
        "target passes": cell(total.num_steps),
        "drafted / verified / emitted": counts(total.num_drafted, total.num_verified, total.num_emitted),
        "rejected / padded": counts(total.num_rejected, total.num_padded),
        "tokens per pass": cell(total.tokens_per_pass, ".2f"),
        "acceptance": cell(total.acceptance_rate if total.num_drafted else None, ".0%"),
        "acceptance by position": Cell(rates, " ".join(cell(rate, ".0%").text for rate in rates) or "–"),
        "PTL first": latency("first"),
        "PTL last": latency("last"),
        "PTL all": latency("all"),
        "tokens/s": cell(_tokens_per_second(batches), ".1f"),
        "prefill": cell(sum(one.prefill for one in timings), ".2f", " s"),
        "decode": cell(sum(one.decode for one in timings), ".2f", " s"),
        "compile": Cell(compile_seconds, f"{compile_seconds:.1f} s ({num_compiled} executables)"),
    }


def _tokens_per_second(batches: Sequence[Generation]) -> float:
    return sum(batch.metrics.num_emitted for batch in batches) / sum(batch.timings.decode for batch in batches)
