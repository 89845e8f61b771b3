"""What ``bass-jax traffic`` shows: the engine while it runs, and tables of what came of it."""

from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bass_jax.engine import Loop
from bass_jax.engine.loop import Counts
from bass_jax.experiments.traffic.traffic_experiment import Result, over_fixed, over_static
from bass_jax.runtime.progress import LiveView

RECENT = 64
"""Steps over which rates are shown."""


class EngineView(LiveView):
    """Slots, queue, tokens per second, acceptance and draft length, redrawn while an engine runs.

    Give it to an engine or a loop as `on_step`.
    """

    def __init__(self, console: Console, *, is_shown: bool = True):
        """Starts without an engine; `is_shown` False draws nothing."""
        self._title = ""
        self._loop: Loop | None = None
        self._recent: deque[tuple[float, Counts]] = deque(maxlen=RECENT)
        super().__init__(console, is_shown=is_shown)

    def begin(self, title: str) -> None:
        """Names the run that comes next."""
        self._title, self._loop = title, None
        self._recent.clear()

    def __call__(self, loop: Loop) -> None:
        """Takes note of a step."""
        self._loop = loop
        self._recent.append((loop.clock(), loop.counts))

    def __rich__(self) -> Panel:
        loop = self._loop
        if loop is None or len(self._recent) < 2:
            return Panel(Text("…"), title=self._title)
        scheduler, counts = loop.scheduler, loop.counts
        (start, before), (now, after) = self._recent[0], self._recent[-1]
        tokens, drafted = after.num_emitted - before.num_emitted, after.num_drafted - before.num_drafted
        accepted = after.num_accepted - before.num_accepted
        num_slots = scheduler.config.num_slots
        slots = Table.grid(padding=(0, 1))
        slots.add_row(
            "slots", ProgressBar(num_slots, scheduler.num_running, width=32),
            f"{scheduler.num_running} of {num_slots} run, batch of {len(scheduler.rows)}",
        )  # fmt: skip
        waits = f"queue {scheduler.num_waiting}, being read {len(scheduler.reading)}, finished {counts.num_finished}"
        memory = f"tokens reserved {scheduler.num_reserved} of {scheduler.config.budget}"
        pool = getattr(loop.executor, "pool", None)
        if pool is not None:
            memory += f", {pool.use().fragmentation(pool.page_size):.0%} of them empty"
        rate = tokens / (now - start) if now > start else 0.0
        share = f"{accepted / drafted:.0%}" if drafted else "–"
        length = "–" if loop.last is None else str(loop.last.draft_len)
        speed = f"{rate:.1f} tokens/s, acceptance {share}, draft length {length}, {now:.1f} s, {counts.num_steps} steps"
        return Panel(Group(slots, Text(waits), Text(memory), Text(speed)), title=self._title)


def results_tables(results: Sequence[Result], traffic: str) -> tuple[Table, Table]:
    """One pattern: times and rates, a row per policy and way of batching."""
    times = Table(title=f"{traffic}: seconds of a request")
    rates = Table(title=f"{traffic}: steps and rates")
    for table, columns in (
        (times, ("mean", "p50", "p90", "p99", "queue", "first token", "PTL ms")),
        (rates, ("tokens/s", "goodput", "rows", "drafts", "accepted")),
    ):
        table.add_column("batching", no_wrap=True)
        table.add_column("policy", overflow="fold")
        for name in columns:
            table.add_column(name, justify="right", min_width=5)
    for one in results:
        if one.traffic != traffic:
            continue
        summary = one.summary
        latency = summary.latency
        cells = (latency.mean, latency.p50, latency.p90, latency.p99, summary.queueing.mean, summary.first_token.mean)
        times.add_row(
            one.batching, one.policy, *(f"{value:.2f}" for value in cells), f"{1e3 * summary.per_token.mean:.1f}"
        )
        rates.add_row(
            one.batching, one.policy, f"{summary.tokens_per_second:.0f}", f"{summary.goodput:.2f}",
            f"{summary.mean_rows:.1f}", f"{summary.mean_draft_len:.1f}",
            f"{summary.acceptance_rate:.0%}" if summary.acceptance_rate == summary.acceptance_rate else "–",
        )  # fmt: skip
    return times, rates


def print_comparisons(out: Console, results: Sequence[Result]) -> None:
    """Continuous over static batching, and adaptive over fixed draft lengths."""
    ratios = over_static(results)
    if ratios:
        table = Table(title="mean latency, static over continuous batching")
        patterns = list(dict.fromkeys(traffic for traffic, _ in ratios))
        table.add_column("policy")
        for pattern in patterns:
            table.add_column(pattern, justify="right")
        for policy in dict.fromkeys(policy for _, policy in ratios):
            table.add_row(policy, *(f"{ratios[pattern, policy]:.2f}x" for pattern in patterns))
        out.print(table)
    for batching in dict.fromkeys(one.batching for one in results):
        gains = over_fixed(results, batching)
        if not gains:
            continue
        table = Table(title=f"mean latency, better fixed length over adaptive, {batching} batching")
        for name in ("policy", "better fixed", "mean"):
            table.add_column(name)
        patterns = list(next(iter(gains.values()))[2])
        for pattern in patterns:
            table.add_column(pattern, justify="right")
        for policy, (better, mean, by_pattern) in gains.items():
            table.add_row(policy, better, f"{mean:.3f}x", *(f"{by_pattern[pattern]:.2f}x" for pattern in patterns))
        out.print(table)
