r"""Tokens per target pass of the acceptance rules, over temperature and draft length, on a real pair.

    python benchmarks/acceptance.py --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```'

Every cell decodes the same prompts with the same seeds; rows of all temperatures share a batch. It counts and times
nothing. The figure behind ± is the standard error over rows. The last line is the table as JSON.
"""

import argparse
import datetime
import json
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import bass_jax as bass
from bass_jax.commands.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--file", type=Path, required=True, help="JSONL with the prompts")
    parser.add_argument("--field", default="prompt")
    parser.add_argument("--template", default="{prompt}")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--temperatures", default="0.2,0.6,1.0,1.4")
    parser.add_argument("--draft-lens", default="2,4,8")
    parser.add_argument("--rules", default="token,block,shared_noise,multi_draft:2,multi_draft:4")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    pair, tokenizer = bass.load_pair(options.pair)
    prompts = read_prompts((), options.file, options.field, options.template.replace("\\n", "\n"))
    encoded = [tokenizer.encode_chat(prompt) for prompt in prompts[: options.num_prompts]]
    temperatures = [float(value) for value in options.temperatures.split(",")]
    cells = []
    for draft_len in map(int, options.draft_lens.split(",")):
        for rule in options.rules.split(","):
            cells += measure(pair, encoded, temperatures, rule, draft_len, options.max_new_tokens)
            print(json.dumps(cells[-1]), flush=True)
    print_table(cells, temperatures)
    print(
        json.dumps(
            {
                "date": datetime.date.today().isoformat(),
                "jax": jax.__version__,
                "num_prompts": len(encoded),
                "max_new_tokens": options.max_new_tokens,
                "cells": cells,
            }
        )
    )


def measure(pair, encoded, temperatures, rule, draft_len, max_new_tokens) -> list[dict]:
    """One cell per temperature."""
    name, _, chains = rule.partition(":")
    rows = encoded * len(temperatures)
    run = bass.generate(
        pair, rows, bass.SpecConfig(draft_len, name, num_chains=int(chains or 1)),
        sampling=bass.Sampling(temperature=np.repeat(temperatures, len(encoded))),
        seeds=range(len(rows)), max_new_tokens=max_new_tokens,
    )  # fmt: skip
    passes = np.sum([info.is_active for info in run.infos], axis=0)[: len(rows)].reshape(len(temperatures), -1)
    emitted = np.array([len(tokens) for tokens in run.tokens]).reshape(passes.shape)
    cells = []
    for temperature, tokens, steps in zip(temperatures, emitted, passes, strict=True):
        ratio = tokens.sum() / steps.sum()
        # Of a ratio of sums, to first order.
        error = np.sqrt(((tokens - ratio * steps) ** 2).sum() * len(steps) / max(len(steps) - 1, 1)) / steps.sum()
        cells.append(
            {"rule": rule, "draft_len": draft_len, "temperature": temperature, "block_efficiency": round(ratio, 3),
             "standard_error": round(float(error), 3), "num_passes": int(steps.sum())}
        )  # fmt: skip
    return cells


def print_table(cells, temperatures) -> None:
    table = Table(title="tokens per target pass")
    for column in ("draft length", "rule", *(f"temperature {value}" for value in temperatures)):
        table.add_column(column, justify="right")
    for first in range(0, len(cells), len(temperatures)):
        row = cells[first : first + len(temperatures)]
        values = (f"{cell['block_efficiency']:.2f} ± {cell['standard_error']:.2f}" for cell in row)
        table.add_row(str(row[0]["draft_len"]), row[0]["rule"], *values)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
