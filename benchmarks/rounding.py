r"""Measures how often the tokens of a greedy row depend on the other rows and on speculation, through rounding.

    python benchmarks/rounding.py --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```'

Regular decoding of each row by itself is compared with regular decoding in a batch, and with speculation by itself and
in a batch, in float32 and in bfloat16. A pass with other shapes rounds differently, so two nearly equal logits can
change their order. The margin is the difference of the two largest log-probabilities, in nats, where a row first
differs. Speculation should change no more rows than batching does. The last line is the table as JSON.
"""

import datetime
import json

import jax
import numpy as np
from prompts import encode_prompts, prompt_parser
from rich.console import Console
from rich.table import Table

import bass_jax as bass


def main() -> None:
    parser = prompt_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    table = Table(title="greedy rows that differ from regular decoding by themselves")
    for column in ("dtype", "decoded by", "rows that differ", "median position", "median margin", "largest margin"):
        table.add_column(column, justify="right")
    cells = []
    for dtype in options.dtypes.split(","):
        pair = bass.load_pair(options.pair, dtype=dtype)
        encoded = encode_prompts(options, pair.tokenizer)[: options.num_prompts]
        single = decode(pair, encoded, 1, "decode", options)
        for step, batch in [("decode", options.batch), ("speculate", 1), ("speculate", options.batch)]:
            cell = compare(single, decode(pair, encoded, batch, step, options))
            name = f"{'regular' if step == 'decode' else 'speculation'}, batch {batch}"
            cells.append({"dtype": dtype, "decoded_by": name, "num_rows": len(encoded), **cell})
            print(json.dumps(cells[-1]), flush=True)
            values = (f"{cell[key]:.3g}" for key in ("median_position", "median_margin", "largest_margin"))
            table.add_row(dtype, name, f"{cell['num_different']} of {len(encoded)}", *values)
    Console(width=120).print(table)
    print(json.dumps({"date": datetime.date.today().isoformat(), "jax": jax.__version__, "cells": cells}))


def decode(pair, encoded, batch, step, options) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tokens and the margins of each row."""
    spec, rows = bass.SpecConfig(options.draft_len, num_logprobs=2), []
    for start in range(0, len(encoded), batch):
        part = encoded[start : start + batch]
        run = bass.generate(pair, part, spec, step=step, max_new_tokens=options.max_new_tokens)
        for tokens, logprobs in zip(run.tokens, run.token_logprobs or [], strict=True):
            rows.append((tokens, logprobs.raw_top_logprobs[:, 0] - logprobs.raw_top_logprobs[:, 1]))
    return rows


def compare(single, other) -> dict:
    """Returns the number of rows that differ, and the positions and margins of their first difference."""
    positions, margins = [], []
    for (expected, margin), (found, _) in zip(single, other, strict=True):
        num = min(len(expected), len(found))
        is_different = expected[:num] != found[:num]
        if is_different.any():
            positions.append(int(is_different.argmax()))
            margins.append(float(margin[positions[-1]]))
    none = [float("nan")]
    return {
        "num_different": len(positions),
        "median_position": float(np.median(positions or none)),
        "median_margin": float(np.median(margins or none)),
        "largest_margin": float(np.max(margins or none)),
    }


if __name__ == "__main__":
    main()
