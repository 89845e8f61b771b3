r"""Measures the tokens per target pass of the acceptance rules, over temperature and draft length, on a real pair.

    python benchmarks/acceptance.py --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```'

Rows of all temperatures share a batch. The first table has the expected number of accepted drafts per pass of the token
and of the block rule, for the same drafts and distributions, so that sampling noise does not hide their difference. The
second table has the tokens per target pass of each rule with the same prompts and seeds. No time is measured. The
numbers after ± are standard errors over rows. The last line is both tables as JSON.
"""

import datetime
import json

import jax
import jax.numpy as jnp
import numpy as np
from prompts import encode_prompts, prompt_parser
from rich.console import Console
from rich.table import Table

import bass_jax as bass
from bass_jax.acceptance import TOKEN
from bass_jax.acceptance.block import prefix_probs

EXPECTED: list[tuple[np.ndarray, ...]] = []
"""Per step: drafts, and the expected accepted drafts of the token and of the block rule, each ``[B]``."""


def _accept_and_record(draft_tokens, num_drafted, draft_probs, target, keys):
    """The token rule, which also records the expected number of accepted drafts of both rules."""
    is_draft = jnp.arange(draft_tokens.shape[1]) < num_drafted[:, None]
    token = draft_tokens[..., None]
    target_prob = jnp.take_along_axis(target.probs[:, :-1], token, axis=2)[..., 0]
    draft_prob = jnp.take_along_axis(draft_probs, token, axis=2)[..., 0]
    ratio = jnp.minimum(target_prob / jnp.where(draft_prob > 0, draft_prob, 1.0), 1.0)
    by_token = jnp.cumprod(jnp.where(is_draft, ratio, 0.0), axis=1).sum(axis=1)
    pass_probs, _ = prefix_probs(draft_tokens, num_drafted, draft_probs, target)
    fail_probs = jnp.where(is_draft, 1.0 - pass_probs, 1.0)
    # The block rule accepts at least i drafts unless the prefix of length i and all longer ones fail.
    by_block = (1.0 - jnp.cumprod(fail_probs[:, ::-1], axis=1)).sum(axis=1)
    jax.debug.callback(lambda *values: EXPECTED.append(tuple(map(np.asarray, values))), num_drafted, by_token, by_block)
    return TOKEN.accept(draft_tokens, num_drafted, draft_probs, target, keys)


bass.acceptance.register_rule(
    bass.acceptance.AcceptanceRule(
        "token_and_block", _accept_and_record, lossless=True, noise="step", source=TOKEN.source
    )
)


def main() -> None:
    parser = prompt_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--temperatures", default="0.2,0.6,1.0,1.4")
    parser.add_argument("--draft-lens", default="2,4,8")
    parser.add_argument("--rules", default="token,block,shared_noise,multi_draft:2,multi_draft:3")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    pair = bass.load_pair(options.pair)
    encoded = encode_prompts(options, pair.tokenizer)[: options.num_prompts]
    temperatures = [float(value) for value in options.temperatures.split(",")]
    draft_lens = [int(value) for value in options.draft_lens.split(",")]
    expected = []
    for draft_len in draft_lens:
        expected += expect(pair, encoded, temperatures, draft_len, options.max_new_tokens)
        print(json.dumps(expected[-1]), flush=True)
    print_expected(expected)
    cells = []
    for draft_len in draft_lens:
        for rule in options.rules.split(","):
            cells += measure(pair, encoded, temperatures, rule, draft_len, options.max_new_tokens)
            print(json.dumps(cells[-1]), flush=True)
    print_table(cells, temperatures)
    record = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "num_prompts": len(encoded),
        "max_new_tokens": options.max_new_tokens,
        "expected": expected,
        "cells": cells,
    }
    print(json.dumps(record))


def decode(pair, encoded, temperatures, spec, max_new_tokens) -> bass.Generation:
    """Decodes all prompts at all temperatures; the rows of a temperature are consecutive."""
    rows = encoded * len(temperatures)
    sampling = bass.SamplingParams(temperature=np.repeat(temperatures, len(encoded)))
    options = bass.DecodeOptions(sampling=sampling, seeds=range(len(rows)), max_new_tokens=max_new_tokens)
    return bass.generate(pair, rows, spec, options, fixed_batch=True)


def expect(pair, encoded, temperatures, draft_len, max_new_tokens) -> list[dict]:
    """Returns the mean expected number of accepted drafts per pass of both rules, for each temperature."""
    EXPECTED.clear()
    run = decode(pair, encoded, temperatures, bass.SpecConfig(draft_len, "token_and_block"), max_new_tokens)
    jax.effects_barrier()
    assert len(EXPECTED) == len(run.infos)
    num_rows = len(run.tokens)
    num_drafted, *accepted = (np.stack(field)[:, :num_rows] for field in zip(*EXPECTED, strict=True))
    passes = (num_drafted > 0).sum(axis=0)
    by_token, by_block = (np.where(num_drafted > 0, values, 0).sum(axis=0) for values in accepted)
    entries = []
    for index, temperature in enumerate(temperatures):
        rows = slice(index * len(encoded), (index + 1) * len(encoded))
        entry = {"draft_len": draft_len, "temperature": temperature, "num_passes": int(passes[rows].sum())}
        for name, values in [("token", by_token), ("block", by_block), ("gain", by_block - by_token)]:
            mean, error = ratio_of_sums(values[rows], passes[rows])
            entry |= {name: round(mean, 4), f"{name}_error": round(error, 4)}
        entries.append(entry)
    return entries


def ratio_of_sums(values, counts) -> tuple[float, float]:
    """Returns ``sum(values) / sum(counts)`` and its standard error over rows, to first order."""
    ratio = values.sum() / counts.sum()
    num = len(counts)
    error = np.sqrt(((values - ratio * counts) ** 2).sum() * num / max(num - 1, 1)) / counts.sum()
    return float(ratio), float(error)


def measure(pair, encoded, temperatures, rule, draft_len, max_new_tokens) -> list[dict]:
    """Returns one cell for each temperature."""
    name, _, candidates = rule.partition(":")
    spec = bass.SpecConfig(draft_len, name, num_candidates=int(candidates or 1))
    run = decode(pair, encoded, temperatures, spec, max_new_tokens)
    num_rows = len(run.tokens)
    passes = np.sum([info.is_active for info in run.infos], axis=0)[:num_rows].reshape(len(temperatures), -1)
    emitted = np.array([len(tokens) for tokens in run.tokens]).reshape(passes.shape)
    cells = []
    for temperature, tokens, steps in zip(temperatures, emitted, passes, strict=True):
        ratio, error = ratio_of_sums(tokens, steps)
        cells.append(
            {
                "rule": rule,
                "draft_len": draft_len,
                "temperature": temperature,
                "tokens_per_pass": round(ratio, 3),
                "standard_error": round(error, 3),
                "num_passes": int(steps.sum()),
            }
        )
    return cells


def print_expected(entries) -> None:
    table = Table(title="expected number of accepted drafts per pass, for the same drafts")
    for column in ("draft length", "temperature", "token", "block", "block - token"):
        table.add_column(column, justify="right")
    for entry in entries:
        values = (f"{entry[name]:.3f} ± {entry[f'{name}_error']:.3f}" for name in ("token", "block", "gain"))
        table.add_row(str(entry["draft_len"]), str(entry["temperature"]), *values)
    Console(width=110).print(table)


def print_table(cells, temperatures) -> None:
    table = Table(title="tokens per target pass")
    for column in ("draft length", "rule", *(f"temperature {value}" for value in temperatures)):
        table.add_column(column, justify="right")
    for first in range(0, len(cells), len(temperatures)):
        row = cells[first : first + len(temperatures)]
        values = (f"{cell['tokens_per_pass']:.2f} ± {cell['standard_error']:.2f}" for cell in row)
        table.add_row(str(row[0]["draft_len"]), row[0]["rule"], *values)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
