r"""Tokens per target pass on requests that resemble each other, with and without the text of finished requests.

    python benchmarks/finished_requests.py --file HumanEval.jsonl.gz

Every function of the file is sent several times with another name, and the model is asked to rewrite it. The requests
run greedily in one engine, in an order that is shuffled once. The tokens have to be the same with every drafter. The
last two columns are the CPU time of drafting and of a whole step for one batch, of which only the ratio is of use on a
machine that does other work. The last line is the table as JSON.
"""

import argparse
import datetime
import json
import time
from pathlib import Path

import jax
import numpy as np

import bass_jax as bass
from bass_jax.experiments.data_sources import read_data

TEMPLATE = "Rewrite this Python function with type hints:\n```python\n{code}```"
DRAFTERS = ("ngram", "suffix", "suffix(shared_tokens=65536)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--file", type=Path, required=True, help="HumanEval")
    parser.add_argument("--num-functions", type=int, default=8)
    parser.add_argument("--num-changes", type=int, default=4, help="requests per function")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--draft-len", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    options = parser.parse_args()

    pair = bass.load_pair(options.pair, drafter="ngram")
    prompts = [pair.tokenizer.encode_chat(text) for text in similar_requests(options)]
    rows, expected = [], None
    for name in options.drafters:
        pair = pair.with_drafter(bass.drafters.find_drafter(name, pair.target))
        row, tokens = run(pair, prompts, options)
        assert expected is None or tokens == expected, f"{name}: other tokens than with {options.drafters[0]}"
        expected = tokens
        rows.append({"drafter": name} | row)
        print(json.dumps(rows[-1]), flush=True)
    date, device = datetime.date.today().isoformat(), jax.devices()[0].device_kind
    arguments = {name: str(value) for name, value in vars(options).items()}
    print(json.dumps({"date": date, "jax": jax.__version__, "device": device, "rows": rows} | arguments))


def similar_requests(options: argparse.Namespace) -> list[str]:
    """Returns the functions under several names, shuffled."""
    texts = []
    for row in read_data(str(options.file))[: options.num_functions]:
        code = row["prompt"] + row["canonical_solution"]
        for change in range(options.num_changes):
            name = row["entry_point"] if change == 0 else f"{row['entry_point']}_{change + 1}"
            texts.append(TEMPLATE.format(code=code.replace(row["entry_point"], name)))
    return [texts[index] for index in np.random.default_rng(0).permutation(len(texts))]


def run(pair: bass.Pair, prompts: list, options: argparse.Namespace) -> tuple[dict, list]:
    """Returns the figures of a drafter, and the tokens of all requests."""
    capacity = 1 << (max(map(len, prompts)) + options.max_new_tokens - 1).bit_length()
    config = bass.EngineConfig(options.slots, capacity, max_waiting=len(prompts), buckets=(options.slots,))
    spec = bass.SpecConfig(options.draft_len, "greedy")
    engine = bass.Engine(pair, spec, config=config, warm_up=False)
    handles = [engine.submit(prompt, max_new_tokens=options.max_new_tokens) for prompt in prompts]
    engine.loop.run()
    counts, tokens = engine.loop.counts, [handle.output().tokens.tolist() for handle in handles]

    state = bass.prefill(pair, prompts[: options.slots], spec, max_new_tokens=options.max_new_tokens)
    sampling = state.sampling_arrays
    processors = bass.sampling.LogitsProcessors(None, state.prompt_lengths, state.stop_tokens)
    keys = jax.random.split(jax.random.key(0), (len(state.lengths), options.draft_len))
    wanted = np.full(len(state.lengths), options.draft_len, np.int32)
    context = bass.drafters.DraftContext(state.tokens, state.lengths, wanted, sampling, keys, processors)
    draft = jax.jit(lambda *args: args[0].propose(*args[1:], options.draft_len, is_sampled=False)[0])
    step = jax.jit(bass.speculate_step)
    figures = {
        "tokens_per_pass": round(counts.num_emitted / counts.num_row_steps, 3),
        "drafted": counts.num_drafted,
        "accepted": counts.num_accepted,
        "steps": counts.num_steps,
        "draft_cpu_ms": round(1e3 * cpu_seconds(lambda: draft(pair.drafter, state.drafter_state, context)), 2),
        "step_cpu_ms": round(1e3 * cpu_seconds(lambda: step(pair, state, spec)[1]), 2),
    }
    return figures, tokens


def cpu_seconds(call, repeats: int = 10) -> float:
    """Returns the CPU time of a call, after one that compiles."""
    jax.block_until_ready(call())
    start = time.process_time()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.process_time() - start) / repeats


if __name__ == "__main__":
    main()
