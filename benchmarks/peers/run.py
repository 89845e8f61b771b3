"""Regular decoding here against `transformers`' generate: same weights, dtype, prompts and device, one run.

    make peers && python benchmarks/peers/run.py

Greedy, float32, no stop token; milliseconds per step without prefill and compilation. The peer and ours take
turns, `--rounds` times; the ratio is taken round by round. The last line is the table as JSON.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import bass_jax as bass
from bass_jax import checkpoint

TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--python", default=".venv-peers/bin/python", help="the peers' environment")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    pair, tokenizer = bass.load_pair(options.pair, drafter="ngram")
    text = tokenizer.encode(TEXT.read_text())
    sizes = [int(size) for size in options.batches.split(",")]
    batches = [[text[64 * row : 64 * row + options.prompt_tokens].tolist() for row in range(size)] for size in sizes]
    rounds = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        checkpoint.save_hugging_face(model, pair.target, tokenizer=tokenizer)
        request = json.dumps({"model": str(model), "batches": batches, "num_tokens": options.num_tokens, "repeats": 2})
        for _ in range(options.rounds):
            done = subprocess.run(
                [options.python, str(Path(__file__).with_name("transformers_generate.py"))],
                input=request, capture_output=True, text=True, check=True,
            )  # fmt: skip
            peer = json.loads(done.stdout.splitlines()[-1])
            rounds.append((peer, [decode(pair, rows, options.num_tokens) for rows in batches]))
    report(sizes, rounds)


def decode(pair, rows, num_tokens) -> dict:
    """Decodes twice, the first to warm up."""
    for _ in range(2):
        run = bass.generate(pair, rows, step="decode", max_new_tokens=num_tokens, stop_tokens=())
    return {"seconds_per_step": statistics.median(run.timings.steps), "tokens": run.tokens}


def report(sizes, rounds) -> None:
    table = Table(title=f"greedy float32 decoding, {rounds[0][0]['threads']} threads")
    for name in ("batch", "transformers ms/step", "bass_jax ms/step", "ratio", "same tokens"):
        table.add_column(name, justify="right")
    cells = []
    for index, size in enumerate(sizes):
        theirs = [statistics.median(peer["results"][index]["seconds_per_step"]) for peer, _ in rounds]
        ours = [own[index]["seconds_per_step"] for _, own in rounds]
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        peer, own = rounds[-1]
        same = np.mean(np.array(peer["results"][index]["tokens"]) == np.stack(own[index]["tokens"]))
        cells.append(
            {
                "batch": size,
                "transformers_ms": round(1e3 * statistics.median(theirs), 1),
                "bass_jax_ms": round(1e3 * statistics.median(ours), 1),
                "ratio": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
                "same_tokens": round(float(same), 4),
            }
        )
        cell = cells[-1]
        table.add_row(
            str(size), f"{cell['transformers_ms']}", f"{cell['bass_jax_ms']}",
            f"{cell['ratio']}x ({cell['ratio_range'][0]}-{cell['ratio_range'][1]})", f"{cell['same_tokens']:.1%}",
        )  # fmt: skip
    Console(width=110).print(table)
    print(
        json.dumps(
            {
                "date": datetime.date.today().isoformat(),
                "jax": jax.__version__,
                "torch": rounds[0][0]["torch"],
                "cells": cells,
            }
        )
    )


if __name__ == "__main__":
    main()
