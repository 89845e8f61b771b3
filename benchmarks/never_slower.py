r"""Compares the policy `auto` with regular decoding and with fixed draft lengths: batch, context, kind of text.

    python benchmarks/never_slower.py --code HumanEval.jsonl.gz --questions gsm8k_test.jsonl \
        --summaries spec_bench_question.jsonl --output never_slower

The files are the data sets HumanEval, GSM8K and Spec-Bench. A context of 1,024 tokens holds solved examples before the
last one, or a longer article. Every cell reads two batches of prompts once. Regular decoding, `auto` and the fixed
lengths then decode copies of these states in turns of a few steps. The next turn is that of the method with the fewest
tokens, so that all of them decode the same part of the answers at about the same time, and other work on the machine
affects all of them. Steps run ahead as in `generate`.

The rounds alternate between the two batches, so that `auto` starts from what it has estimated on other prompts of the
kind, as in a process that has run for a while. Two rounds that are not counted compile the steps. Compilation and
prefill are not timed. Intervals are of the median over the rounds, by bootstrap. The best fixed length is chosen on
one half of the rounds and compared on the other.

The benchmark writes OUTPUT.json after every cell and continues from it; at the end it writes OUTPUT.svg.
"""

import argparse
import datetime
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bass_jax as bass
from bass_jax.cli.arguments import numbers
from bass_jax.decoding.compiled_steps import CompiledSteps
from bass_jax.engine import EngineConfig
from bass_jax.engine.device_executor import DeviceExecutor
from bass_jax.engine.request import Request, RequestHandle
from bass_jax.engine.slots import regroup_rows
from bass_jax.experiments.data_sources import read_data
from bass_jax.runtime.jit_cache import JIT_CACHE

FIXED = (1, 2, 4, 6)
METHODS = ("regular", "auto", *(f"fixed {length}" for length in FIXED))
STEPS_PER_TURN, NUM_WARM_UP = 8, 2
SHORT, LONG = 128, 1024
GRID = [(SHORT, batch) for batch in (1, 2, 4, 8, 16, 32)] + [(LONG, batch) for batch in (1, 2, 4, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--draft", help="drafter of the pair (default: the pair's own)")
    for kind in ("code", "questions", "summaries"):
        parser.add_argument(f"--{kind}", required=True, help="JSON Lines file")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=numbers, default=[SHORT, LONG])
    parser.add_argument("--kinds", default="code,questions,summaries,code at 0.8")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("never_slower"))
    options = parser.parse_args()
    path = options.output.with_suffix(".json")
    about = {"date": f"{datetime.date.today()}", "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    record = json.loads(path.read_text()) if path.exists() else about | {"cells": []}
    done = {(cell["kind"], cell["context"], cell["batch"]) for cell in record["cells"]}
    pair = bass.load_pair(options.pair, drafter=options.draft)
    for kind, (context, batch) in itertools.product(options.kinds.split(","), GRID):
        if context not in options.contexts or batch not in options.batches or (kind, context, batch) in done:
            continue
        cell = {"kind": kind, "context": context, "batch": batch} | measure(options, pair, kind, context, batch)
        record["cells"].append(cell)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(row(cell), flush=True)
    print(summary(record["cells"]))
    plot(record["cells"], options.output.with_suffix(".svg"))


def measure(options, pair: bass.Pair, kind: str, context: int, batch: int) -> dict:
    """Decodes one cell with all methods in turns."""
    # Some kinds have fewer messages that are short enough: HumanEval has 36 of at most 128 tokens.
    found = itertools.cycle(messages(options, pair.tokenizer, kind.split()[0], context))
    texts = itertools.islice(found, 2 * batch)
    prompts = [pair.tokenizer.encode_chat(text) for text in texts]
    sampling = bass.SamplingParams(temperature=0.8 if "0.8" in kind else 0.0)
    settings = {"sampling": sampling, "max_new_tokens": options.max_new_tokens}
    both = bass.prefill(pair, prompts, bass.SpecConfig(FIXED[-1]), **settings)
    batches = [regroup_rows(both, part, both.finish[part]) for part in jnp.arange(2 * batch).reshape(2, batch)]
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    rates: dict[str, list[float]] = {method: [] for method in METHODS}
    lengths = []
    for turn in range(-NUM_WARM_UP, options.rounds):
        runs = {method: Run(pair, batches[turn % 2], method, sampling.is_greedy) for method in METHODS}
        while running := [run for run in runs.values() if not run.is_finished]:
            min(running, key=lambda run: run.num_tokens).advance()
        if turn >= 0:
            lengths.append(runs["auto"].num_drafted / runs["auto"].num_row_steps)
            for method, run in runs.items():
                seconds[method].append(run.seconds)
                rates[method].append(run.num_tokens / run.seconds)
    # Both halves have as many rounds of either batch.
    halves = {name: [found[0::4] + found[1::4], found[2::4] + found[3::4]] for name, found in rates.items()}
    medians = {name: [statistics.median(half) for half in found] for name, found in halves.items()}
    best = max(FIXED, key=lambda length: medians[f"fixed {length}"][0])
    fixed = max(medians[f"fixed {best}"][1], medians["regular"][1])
    ratios = np.array(rates["auto"]) / np.array(rates["regular"])
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    return {
        "tokens_per_second": {method: round(statistics.median(found), 2) for method, found in rates.items()},
        "auto_over_regular": round(statistics.median(ratios), 3),
        "interval": np.percentile(np.median(draws, axis=1), [2.5, 97.5]).round(3).tolist(),
        "best_fixed": best,
        "auto_over_best_fixed": round(medians["auto"][1] / fixed, 3),
        "draft_len": round(statistics.mean(lengths), 2),
        "rounds": {method: [round(value, 4) for value in found] for method, found in seconds.items()},
    }


class Run:
    """A copy of a state that one method decodes."""

    def __init__(self, pair: bass.Pair, state: bass.decoding.SpecState, method: str, is_greedy: bool):
        name = "decode" if method == "regular" else "speculate"
        draft_len = int(method.split()[1]) if method.startswith("fixed") else None
        steps = CompiledSteps(name, bass.SpecConfig(draft_len), is_greedy)
        copy = jax.tree.map(jnp.copy, state)
        if draft_len is not None:
            copy = copy._replace(draft_lens=jnp.full_like(copy.draft_lens, draft_len))
        num_rows, capacity = state.tokens.shape
        config = EngineConfig(num_slots=num_rows, capacity=capacity, buckets=(num_rows,))
        self.executor = DeviceExecutor(pair, steps, config, lambda handle: state, copy)
        rooms = np.asarray(state.limits - state.lengths).tolist()
        self.handles = [RequestHandle(Request(np.zeros(1, np.int32), room)) for room in rooms]
        self.executor.start(self.handles)
        self.seconds, self.num_tokens, self.num_drafted, self.num_row_steps = 0.0, 0, 0, 0
        self.is_finished = False

    def advance(self) -> None:
        """Runs `STEPS_PER_TURN` steps as `generate` does, where possible each before the last one is collected.

        No step is in flight afterwards, so that none takes part in the turn of another method.
        """
        start, compiled = time.perf_counter(), JIT_CACHE.compile_seconds
        num_dispatched = num_collected = 0
        while num_collected < STEPS_PER_TURN and not self.is_finished:
            if num_dispatched == num_collected:
                self.executor.dispatch()
                num_dispatched += 1
            if num_dispatched < STEPS_PER_TURN and self.executor.can_run_ahead():
                self.executor.dispatch()
                num_dispatched += 1
            info = self.executor.collect().info
            num_collected += 1
            for handle, num in zip(self.handles, info.num_emitted.tolist(), strict=True):
                handle.num_tokens += num
            self.num_tokens += int(info.num_emitted.sum())
            self.num_drafted += int(info.num_drafted.sum())
            self.num_row_steps += int(info.is_active.sum())
            self.is_finished = bool((info.finish != bass.FinishReason.RUNNING).all())
        self.seconds += time.perf_counter() - start - (JIT_CACHE.compile_seconds - compiled)
        self.executor.wait()  # for a step ahead of the last one, in which no row runs


def messages(options, tokenizer, kind: str, context: int) -> Iterator[str]:
    """Yields messages of at most `context` tokens: as many solved examples, or as much of an article, as fit."""
    rows = read_data(getattr(options, kind))

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode_chat(text))

    if kind == "summaries":
        for record in rows:
            if record["category"] == "summarization":
                words = record["turns"][0].split()
                # A token is at most a word, so the halves converge on the longest beginning that fits.
                low, high = 1, len(words)
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if num_tokens(" ".join(words[:middle])) <= context else (low, middle - 1)
                yield " ".join(words[:low])
        return
    if kind == "code":
        request = "Complete the following Python function:\n"
        examples = [(f"{request}{record['prompt']}", record["canonical_solution"]) for record in rows]
    else:
        examples = [(record["question"], f"\n{record['answer']}") for record in rows]
    for index, (text, _) in enumerate(examples):
        if num_tokens(text) > context:
            continue
        for other, solution in examples[index + 1 :] + examples[:index]:
            longer = f"{other}{solution}\n\n{text}"
            if num_tokens(longer) > context:
                break
            text = longer
        yield text


def row(cell: dict) -> str:
    """Returns a line of the table."""
    rates = [f"{cell['tokens_per_second'][method]:.1f}" for method in METHODS]
    low, high = cell["interval"]
    ratio = f"{cell['auto_over_regular']:.2f}x ({low:.2f}-{high:.2f})"
    fixed = f"{cell['auto_over_best_fixed']:.2f}x of {cell['best_fixed']}"
    values = (cell["kind"], cell["context"], cell["batch"], *rates, f"{cell['draft_len']:.1f}", ratio, fixed)
    return "| " + " | ".join(map(str, values)) + " |"


def summary(cells: list[dict]) -> str:
    """Returns the medians over the cells, and the cells that are slower than regular decoding."""
    regular = statistics.median(cell["auto_over_regular"] for cell in cells)
    fixed = statistics.median(cell["auto_over_best_fixed"] for cell in cells)
    slower = [f"{cell['kind']}, {cell['context']}, {cell['batch']}" for cell in cells if cell["interval"][1] < 0.97]
    return (
        f"median over regular {regular:.3f}x, over the best fixed length {fixed:.3f}x; below 0.97x: {slower or 'none'}"
    )


def plot(cells: list[dict], path: Path) -> None:
    """Draws the speed-up of `auto` and of every fixed length over the batch, a panel per kind and context."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((cell["kind"], cell["context"]) for cell in cells))
    figure = Figure(figsize=(3.2 * len(panels), 3.0), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        found = sorted(
            (cell for cell in cells if (cell["kind"], cell["context"]) == panel), key=lambda one: one["batch"]
        )
        for method in METHODS[1:]:
            rates = [cell["tokens_per_second"] for cell in found]
            style = {"linewidth": 2.5, "color": "black"} if method == "auto" else {"linewidth": 1.0}
            axes.plot(
                [cell["batch"] for cell in found],
                [one[method] / one["regular"] for one in rates],
                label=method,
                **style,
            )
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set(title=f"{panel[0]}, context {panel[1]}", xlabel="batch")
    all_axes[0].set_ylabel("speed over regular decoding")
    all_axes[0].legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    main()
