r"""How often a greedy row's tokens depend on what shares its pass, in float32 and in bfloat16.

    python benchmarks/rounding.py --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```'

Regular decoding of each row alone is compared with regular decoding in a batch and with speculation alone and in a
batch. A pass over other shapes rounds otherwise, so that two logits that are nearly equal may change places; the margin
is what lay between the two most probable tokens, in nats, where a row first differs. Speculation should lose no more
than batching does. The last line is the table as JSON.
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

    table = Table(title="greedy rows that differ from regular decoding alone")
    for column in ("dtype", "decoded by", "rows that differ", "tokens until then", "median margin", "largest margin"):
        table.add_column(column, justify="right")
    cells = []
    for dtype in options.dtypes.split(","):
        pair, tokenizer = bass.load_pair(options.pair, dtype=dtype)
        encoded = encode_prompts(options, tokenizer)[: options.num_prompts]
        alone = decode(pair, encoded, 1, "decode", options)
        for step, batch in [("decode", options.batch), ("speculate", 1), ("speculate", options.batch)]:
            cell = compare(alone, decode(pair, encoded, batch, step, options))
            name = f"{'regular' if step == 'decode' else 'speculation'}, batch {batch}"
            cells.append({"dtype": dtype, "decoded_by": name, "num_rows": len(encoded), **cell})
            print(json.dumps(cells[-1]), flush=True)
            values = (f"{cell[key]:.3g}" for key in ("median_position", "median_margin", "largest_margin"))
            table.add_row(dtype, name, f"{cell['num_different']} of {len(encoded)}", *values)
    Console(width=120).print(table)
    print(json.dumps({"date": datetime.date.today().isoformat(), "jax": jax.__version__, "cells": cells}))


def decode(pair, encoded, batch, step, options) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and margins, per row."""
    spec, rows = bass.SpecConfig(options.draft_len, num_logprobs=2), []
    for start in range(0, len(encoded), batch):
        run = bass.generate(
            pair, encoded[start : start + batch], spec, step=step, max_new_tokens=options.max_new_tokens
        )
        rows += [
            (tokens, distributions.raw_top_logprobs[:, 0] - distributions.raw_top_logprobs[:, 1])
            for tokens, laws in zip(run.tokens, run.distributions or [], strict=True)
        ]
    return rows


def compare(alone, other) -> dict:
    positions, margins = [], []
    for (expected, margin), (found, _) in zip(alone, other, strict=True):
        num = min(len(expected), len(found))
        is_different = expected[:num] != found[:num]
        if is_different.any():
            positions.append(int(is_different.argmax()))
            margins.append(float(margin[positions[-1]]))
    nothing = [float("nan")]
    return {
        "num_different": len(positions),
        "median_position": float(np.median(positions or nothing)),
        "median_margin": float(np.median(margins or nothing)),
        "largest_margin": float(np.max(margins or nothing)),
    }


if __name__ == "__main__":
    main()
