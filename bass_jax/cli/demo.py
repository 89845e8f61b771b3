"""``bass-jax demo``: regular and speculative decoding at several batch sizes, with the defaults."""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bass_jax.cli import arguments as args
from bass_jax.cli.output import Cell, Output, cell
from bass_jax.cli.prompt_arguments import collect_prompts

EXAMPLES = """examples:
  bass-jax demo
  bass-jax demo --batches 1,8 --file prompts.txt --plot demo.svg
"""

MIN_SECONDS = 10
"""Both ways of decoding take turns for at least so long per batch size, compilation not counted."""

BAR_WIDTH = 40
"""Characters of the longest bar."""


class DemoRow(NamedTuple):
    """The results of one batch size."""

    batch: int
    regular: float  # tokens per second, median of the rounds
    speculative: float
    draft_len: float  # mean of the drafts per row and step, over all rounds
    tokens_per_pass: float
    is_identical: bool

    @property
    def speed_up(self) -> float:
        """Speculative over regular decoding."""
        return self.speculative / self.regular


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    args.add_all(
        parser,
        args.argument("--pair", "target and draft", "checkpoints/quickstart"),
        args.argument("--file", "text with one prompt per line", Path("configs/demo_prompts.txt")),
        args.argument("--batches", "rows that are decoded together", "1,2,4,8", type=args.numbers),
        args.max_new_tokens(48),
        args.argument("--plot", "SVG image of the table", Path("demo.svg")),
    )


def run(options: argparse.Namespace, out: Output) -> int:
    """Decodes and prints; returns the exit code."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from bass_jax.cli.generate_display import describe_compilation
    from bass_jax.decoding.load_pair import load_pair
    from bass_jax.runtime.jit_cache import JIT_CACHE
    from bass_jax.runtime.xla_flags import use_compilation_cache

    prompts = collect_prompts((), options.file, "prompt", "{prompt}")
    use_compilation_cache()
    pair = load_pair(options.pair)
    encoded = [pair.tokenizer.encode_prompt(prompt) for prompt in prompts]
    rows, texts, compile_seconds = [], [], 0.0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=MIN_SECONDS * len(options.batches))

        def on_run(batch: int, name: str, seconds: float) -> None:
            done = MIN_SECONDS * len(rows) + min(seconds, MIN_SECONDS)
            progress.update(task, completed=done, description=f"batch {batch}, {name}")

        def on_compile(function: Callable, arguments: tuple) -> None:
            progress.update(task, description=describe_compilation(function, arguments))

        with JIT_CACHE.reporting_to(on_compile):
            for batch in options.batches:
                row, texts, seconds = _measure(pair, encoded, batch, options.max_new_tokens, on_run)
                rows.append(row)
                compile_seconds += seconds
    for prompt, text in list(zip(prompts, texts, strict=True))[:2]:
        out.show(Text(f"{prompt}\n", style="bold"), Text(f"{text.strip()}\n"))
    out.value("texts", texts)
    _print(out, rows, len(prompts), compile_seconds)
    with contextlib.suppress(ImportError):
        import matplotlib  # noqa: F401

        out.note(_plot(rows, options.plot))
    return 0


def _measure(
    pair, prompts: Sequence, batch: int, max_new_tokens: int, on_run: Callable[[int, str, float], None]
) -> tuple[DemoRow, list[str], float]:
    """Decodes all prompts, `batch` at a time, in both ways; returns the results, the texts and the compile time."""
    from bass_jax.decoding.metrics import summarize
    from bass_jax.engine.generate import generate

    runs: dict[str, list] = {"speculate": [], "decode": []}
    seconds = 0.0
    while seconds < MIN_SECONDS:
        for step, name in (("speculate", "speculative"), ("decode", "regular")):
            on_run(batch, name, seconds)
            found = generate(pair, prompts, step=step, max_batch=batch, max_new_tokens=max_new_tokens)
            runs[step].append(found)
            seconds += found.timings.decode
    speculative, regular = (statistics.median(one.tokens_per_second for one in found) for found in runs.values())
    total = summarize([info for one in runs["speculate"] for info in one.infos])
    tokens = [[row.tolist() for row in one.tokens] for found in runs.values() for one in found]
    row = DemoRow(
        batch,
        regular,
        speculative,
        total.num_drafted / total.num_row_steps,
        total.tokens_per_pass,
        all(one == tokens[0] for one in tokens),
    )
    return row, runs["speculate"][-1].texts, sum(one.timings.compile for found in runs.values() for one in found)


def _print(out: Output, rows: Sequence[DemoRow], num_prompts: int, compile_seconds: float) -> None:
    import jax

    names = ("batch", "regular, tokens/s", "speculative, tokens/s", "drafts", "tokens per pass", "speed-up", "outputs")
    cells = [
        (
            cell(row.batch),
            cell(row.regular, ".1f"),
            cell(row.speculative, ".1f"),
            cell(row.draft_len, ".1f"),
            cell(row.tokens_per_pass, ".2f"),
            cell(row.speed_up, ".2f", "x"),
            Cell(row.is_identical, "identical" if row.is_identical else "NOT identical"),
        )
        for row in rows
    ]
    out.table(names, cells, f"{num_prompts} prompts, greedy, on {jax.devices()[0].device_kind}")
    longest = max(max(row.regular, row.speculative) for row in rows)
    for row in rows:
        for name, rate in (("regular", row.regular), ("speculative", row.speculative)):
            bar = "█" * max(1, round(BAR_WIDTH * rate / longest))
            out.show(f"batch {row.batch:>2} {name:>11} {bar} {rate:.0f}")
    out.note(f"Medians of rounds in turns, without compilation ({compile_seconds:.0f} s) and the first prefill.")
    if jax.default_backend() == "cpu":
        out.note("On a CPU each further token of a pass costs time, so large batches gain little and draft little.")


def _plot(rows: Sequence[DemoRow], path: Path) -> str:
    from bass_jax.cli.plots import new_figure, save_figure

    figure = new_figure(6.0, 3.5)
    axes = figure.subplots()
    places = range(len(rows))
    for offset, name in ((-0.2, "regular"), (0.2, "speculative")):
        axes.bar([place + offset for place in places], [getattr(row, name) for row in rows], 0.4, label=name)
    for place, row in zip(places, rows, strict=True):
        axes.annotate(f"{row.speed_up:.2f}x", (place, max(row.regular, row.speculative)), ha="center", va="bottom")
    axes.set_xticks(list(places), [f"{row.batch}" for row in rows])
    axes.set(xlabel="batch", ylabel="tokens per second")
    axes.legend()
    return save_figure(figure, path)
