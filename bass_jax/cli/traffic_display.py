"""The displays of ``bass-jax traffic``: the running engine, and the tables of results."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bass_jax.cli.output import Output, cell
from bass_jax.engine import Counts, Loop
from bass_jax.runtime.progress import LiveView

if TYPE_CHECKING:
    from bass_jax.experiments.traffic.traffic_experiment import TrafficResult

_NUM_RECENT = 64
"""Steps over which rates are computed."""


class EngineView(LiveView):
    """A live view of an engine: slots, queue, tokens per second, acceptance and draft length.

    Pass it to an engine or a loop as `on_step`.
    """

    def __init__(self, console: Console, *, is_shown: bool = True):
        """Makes a view without an engine; it draws nothing if `is_shown` is False."""
        self._title = ""
        self._loop: Loop | None = None
        self._recent: deque[tuple[float, Counts]] = deque(maxlen=_NUM_RECENT)
        super().__init__(console, is_shown=is_shown)

    def begin(self, title: str) -> None:
        """Starts the display of another run."""
        self._title, self._loop = title, None
        self._recent.clear()

    def __call__(self, loop: Loop) -> None:
        """Records a step."""
        self._loop = loop
        self._recent.append((loop.clock(), loop.counts))

    def __rich__(self) -> Panel:
        loop = self._loop
        if loop is None or len(self._recent) < 2:
            return Panel(Text("…"), title=self._title)
        scheduler, counts = loop.scheduler, loop.counts
        (start, before), (now, after) = self._recent[0], self._recent[-1]
        num_drafted = after.num_drafted - before.num_drafted
        num_running, num_slots = scheduler.num_running, scheduler.config.num_slots
        slots = Table.grid(padding=(0, 1))
        rows = f"{num_running} of {num_slots} running, batch of {len(scheduler.rows)}"
        slots.add_row("slots", ProgressBar(num_slots, num_running, width=32), rows)
        queue = f"queue {scheduler.num_waiting}, prefill {len(scheduler.reading)}, finished {counts.num_finished}"
        memory = f"tokens reserved {scheduler.num_reserved} of {scheduler.config.budget}"
        pool = getattr(loop.executor, "pool", None)
        if pool is not None:
            memory += f", {pool.use().fragmentation(pool.page_size):.0%} of them empty"
        rate = (after.num_emitted - before.num_emitted) / (now - start) if now > start else 0.0
        acceptance = f"{(after.num_accepted - before.num_accepted) / num_drafted:.0%}" if num_drafted else "–"
        length = "–" if loop.last is None else str(loop.last.draft_len)
        speed = f"{rate:.1f} tokens/s, acceptance {acceptance}, draft length {length}"
        time = f"{now:.1f} s, {counts.num_steps} steps"
        return Panel(Group(slots, Text(queue), Text(memory), Text(f"{speed}, {time}")), title=self._title)


def print_results(out: Output, results: Sequence["TrafficResult"], pattern: str) -> None:
    """Prints the tables of one pattern, of times and of rates, with a row per kind of batching and policy."""
    times, rates = [], []
    for _, batching, policy, metrics, _ in (one for one in results if one.pattern == pattern):
        latency = metrics.latency
        seconds = (latency.mean, latency.p50, latency.p90, latency.p99, metrics.queueing.mean, metrics.first_token.mean)
        times.append((batching, policy, *(cell(x, ".2f") for x in seconds), cell(1e3 * metrics.per_token.mean, ".1f")))
        numbers = (cell(metrics.tokens_per_second, ".0f"), cell(metrics.goodput, ".2f"))
        means = (cell(metrics.mean_rows, ".1f"), cell(metrics.mean_draft_len, ".1f"))
        rates.append((batching, policy, *numbers, *means, cell(metrics.acceptance_rate, ".0%")))
    names = ("mean", "p50", "p90", "p99", "queue", "first token", "PTL ms")
    rate_names = ("tokens/s", "goodput", "rows", "drafts", "accepted")
    out.table(("batching", "policy", *names), times, f"{pattern}: seconds of a request", num_left=2)
    out.table(("batching", "policy", *rate_names), rates, f"{pattern}: steps and rates", num_left=2)


def print_gains(out: Output, results: Sequence["TrafficResult"]) -> None:
    """Prints the gains of continuous over static batching, and of adaptive over fixed draft lengths."""
    # Imported here, because the server uses this module too.
    from bass_jax.experiments.traffic.traffic_experiment import gain_over_fixed, gain_over_phases, gain_over_static

    patterns = list(dict.fromkeys(one.pattern for one in results))
    if ratios := gain_over_static(results):
        policies = dict.fromkeys(policy for _, policy in ratios)
        rows = [(one, *(cell(ratios[pattern, one], ".2f", "x") for pattern in patterns)) for one in policies]
        out.table(("policy", *patterns), rows, "mean latency, static over continuous batching")
    for batching in dict.fromkeys(one.batching for one in results):
        gains = gain_over_fixed(results, batching)
        rows = [
            (policy, better, cell(mean, ".3f", "x"), *(cell(by_pattern[one], ".2f", "x") for one in patterns))
            for policy, (better, mean, by_pattern) in gains.items()
        ]
        if rows:
            title = f"mean latency, better fixed length over adaptive, {batching} batching"
            out.table(("policy", "better fixed", "mean", *patterns), rows, title, num_left=3)
        if gains := gain_over_phases(results, batching):
            names = list(next(iter(gains.values())))
            rows = [(policy, *(cell(gain[one], ".2f", "x") for one in names)) for policy, gain in gains.items()]
            title = f"mean latency, best other policy of each phase over adaptive, {batching} batching"
            out.table(("policy", *names), rows, title)
