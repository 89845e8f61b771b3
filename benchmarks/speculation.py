r"""Compares the time of speculation and of regular decoding, over batch size, drafter and draft length.

    python benchmarks/speculation.py --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```'

Every cell decodes the same prompts greedily with `decode_step` and with `speculate_step`, in turns, `--repeats` times.
The table has the medians of the tokens per second and of the ratios, and whether the tokens were identical. Compilation
and prefill are not timed. The last line is the table as JSON.
"""

import datetime
import json
import platform
import statistics

import jax
import numpy as np
from prompts import encode_prompts, prompt_parser
from rich.console import Console
from rich.table import Table

import bass_jax as bass


def main() -> None:
    parser = prompt_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=8, help="prompts per cell, a multiple of the batch sizes")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--drafters", default="draft_model,ngram")
    parser.add_argument("--draft-lens", default="2,4")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    cells = []
    pairs = {name: bass.load_pair(options.pair, drafter=name) for name in options.drafters.split(",")}
    encoded = encode_prompts(options, next(iter(pairs.values())).tokenizer)[: options.num_prompts]
    for batch in map(int, options.batches.split(",")):
        for name, pair in pairs.items():
            for draft_len in map(int, options.draft_lens.split(",")):
                cells.append(measure(options, pair, name, encoded, batch, draft_len))
                print(json.dumps(cells[-1]), flush=True)
    print_table(cells)
    record = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "max_new_tokens": options.max_new_tokens,
        "num_prompts": len(encoded),
        "cells": cells,
    }
    print(json.dumps(record))


def measure(options, pair, name, encoded, batch, draft_len) -> dict:
    """Returns the medians of one cell."""
    spec = bass.SpecConfig(draft_len=draft_len)
    rates, baselines, ratios, is_identical = [], [], [], True
    for _ in range(options.repeats):
        seconds = {"speculate": 0.0, "decode": 0.0}
        num_emitted = num_passes = 0
        for start in range(0, len(encoded), batch):
            rows = encoded[start : start + batch]
            runs = {
                step: bass.generate(pair, rows, spec, max_new_tokens=options.max_new_tokens, step=step)
                for step in seconds
            }
            for step, run in runs.items():
                seconds[step] += run.timings.decode
            num_emitted += runs["speculate"].metrics.num_emitted
            num_passes += runs["speculate"].metrics.num_row_steps
            is_identical &= all(map(np.array_equal, runs["speculate"].tokens, runs["decode"].tokens))
        rates.append(num_emitted / seconds["speculate"])
        baselines.append(num_emitted / seconds["decode"])
        ratios.append(seconds["decode"] / seconds["speculate"])
    return {
        "batch": batch,
        "drafter": name,
        "draft_len": draft_len,
        "tokens_per_pass": round(num_emitted / num_passes, 3),
        "decode_tokens_per_s": round(statistics.median(baselines), 1),
        "speculate_tokens_per_s": round(statistics.median(rates), 1),
        "speed_up": round(statistics.median(ratios), 3),
        "speed_up_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "is_identical": is_identical,
    }


def print_table(cells) -> None:
    table = Table(title="greedy, medians")
    names = "batch,drafter,draft length,tokens per pass,decode tokens/s,speculate tokens/s,speed-up,identical"
    for name in names.split(","):
        table.add_column(name, justify="right")
    for cell in cells:
        low, high = cell["speed_up_range"]
        table.add_row(
            str(cell["batch"]),
            cell["drafter"],
            str(cell["draft_len"]),
            f"{cell['tokens_per_pass']:.2f}",
            f"{cell['decode_tokens_per_s']:.1f}",
            f"{cell['speculate_tokens_per_s']:.1f}",
            f"{cell['speed_up']:.2f}x ({low:.2f}-{high:.2f})",
            "yes" if cell["is_identical"] else "NO",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
