r"""Compares draft-length policies with fixed lengths and regular decoding, over the batch size, and the simulator.

    python benchmarks/policies.py --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```' --output policies

The pair is first profiled: costs, and acceptance on separate prompts. Then batches of other prompts are decoded
greedily with every method in turns, `--repeats` times, so that other work on the machine affects all methods. An
exhaustive run of the same prompts is simulated with the profile's costs, and the simulated tokens per target pass and
seconds are compared with the measured ones. Compilation and prefill are not timed. A step does the same work in every
repeat. Its time is therefore the median over the repeats, and the time of a method is the sum over its steps. The
benchmark writes OUTPUT.json after every batch size, then OUTPUT.md and OUTPUT.png. It takes 20 to 40 minutes on two
cores.
"""

import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from prompts import encode_prompts, prompt_parser

import bass_jax as bass
from bass_jax import policies
from bass_jax.analysis.profiler import measure_profile
from bass_jax.analysis.replay import make_replay
from bass_jax.analysis.simulator import compose, regret, simulate
from bass_jax.cost_model import read_profile
from bass_jax.decoding.policy_runner import advance_rows, counts_of, no_step, rows_of
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.traces import TraceWriter, read_trace

LENGTHS = (0, 1, 2, 4)
"""The lengths that policies choose from. The profile also has 8, for policies that exceed them."""


def main() -> None:
    parser = prompt_parser(__doc__)
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument(
        "--num-prompts", type=int, default=16, help="number of prompts for the largest batch; small batches use fewer"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="a profile of this pair on this machine, instead of a new one")
    parser.add_argument("--methods", help="comma-separated, with regular first (default: all)")
    parser.add_argument(
        "--bandit", action="store_true", help="also measure the bandit, which the simulator cannot time"
    )
    parser.add_argument("--output", type=Path, default=Path("policies"))
    options = parser.parse_args()

    pair = bass.load_pair(options.pair)
    encoded = encode_prompts(options, pair.tokenizer)
    # All prompts have the capacity bucket that is profiled.
    room = 256 - options.max_new_tokens
    encoded = [row for row in encoded if 256 - 2 * options.max_new_tokens < len(row) <= room]
    decoded, profiled = encoded[: options.num_prompts], encoded[options.num_prompts : options.num_prompts + 8]
    if len(profiled) < 8:
        raise SystemExit(f"--file has {len(encoded)} prompts of fitting length: expected {options.num_prompts + 8}")
    batches = [int(batch) for batch in options.batches.split(",")]

    start = time.perf_counter()
    if options.profile is not None:
        profile = read_profile(options.profile)
    else:
        profile = measure_profile(
            pair,
            profiled,
            bass.SpecConfig(8),
            name=options.pair,
            max_new_tokens=64,
            batches=batches,
            draft_lens=(*LENGTHS, 8),
            contexts=(216,),
            on_cell=lambda cell: print(f"profile: {cell}", flush=True),
        )
    profile.write(options.output.with_suffix(".profile.json"))
    replay, exhaustive_seconds = exhaustive(options, pair, decoded)
    methods = {
        "regular": policies.fixed(0),
        **{f"fixed {length}": policies.fixed(length) for length in LENGTHS[1:]},
        "bass_heuristic": policies.bass_heuristic(),
        "batch_table": policies.batch_table(profile=profile, lengths=LENGTHS),
        "auto": policies.auto(profile=profile, lengths=LENGTHS),
        "confidence": policies.confidence(max_len=4),
        **({"bandit": policies.bandit(lengths=LENGTHS)} if options.bandit else {}),
    }
    if options.methods is not None:
        methods = {name: methods[name] for name in options.methods.split(",")}
    record = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "max_new_tokens": options.max_new_tokens,
        "num_prompts": len(decoded),
        "fit_errors": profile.fit_errors(),
        "rates": profile.rates,
        "profile_seconds": time.perf_counter() - start - exhaustive_seconds,
        "exhaustive_seconds": exhaustive_seconds,
        "cells": [],
    }
    for batch in batches:
        rows = decoded[: min(max(2 * batch, 4), options.num_prompts)]
        record["cells"] += measure(options, pair, methods, rows, batch, replay, profile)
        options.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["cells"][-len(methods) :]), flush=True)
    record["seconds"] = time.perf_counter() - start
    options.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(tables(record))
    plot(record, options.output.with_suffix(".png"))
    print(tables(record))


def exhaustive(options, pair, rows):
    """Records an exhaustive run of all prompts as one batch, and returns its replay and time."""
    path = options.output.with_suffix(".trace.jsonl")
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    spec, decode_options = bass.SpecConfig(8), bass.DecodeOptions(max_new_tokens=options.max_new_tokens)
    with TraceWriter(path) as trace:
        bass.generate(pair, rows, spec, decode_options, step="exhaustive", trace=trace)
    return make_replay(read_trace(path)), time.perf_counter() - start


def measure(options, pair, methods, rows, batch, replay, profile) -> list[dict]:
    """Returns one cell per method, with its medians and its simulation."""
    steps: dict[str, list[list[float]]] = {name: [] for name in methods}
    runs = {name: [] for name in methods}
    decode_options = bass.DecodeOptions(max_new_tokens=options.max_new_tokens, warm_up=False)
    for repeat in range(-1, options.repeats):  # the first round compiles
        for name, policy in methods.items():
            times: list[float] = []
            for start in range(0, len(rows), batch):
                if repeat < 0 and start:
                    break
                run = bass.generate(
                    pair, rows[start : start + batch], bass.SpecConfig(4), decode_options, policy=policy
                )
                times += run.timings.steps
                if repeat == 0:
                    runs[name].append(run)
            if repeat >= 0:
                steps[name].append(times)
    seconds = {name: [sum(times) for times in found] for name, found in steps.items()}
    texts = {name: [row.tolist() for run in found for row in run.tokens] for name, found in runs.items()}
    update = update_seconds(pair, methods["auto"], rows[:batch])
    batches = compose(len(rows), batch)
    simulated = {name: simulate(replay, policy, profile.table, batches) for name, policy in methods.items()}
    oracle = regret(replay, {}, profile.table, batches, range(9))["oracle"][0]
    cells = []
    for name in methods:
        # The steps of the bandit differ from repeat to repeat.
        has_equal_steps = len({len(times) for times in steps[name]}) == 1
        median = np.median(steps[name], axis=0).sum() if has_equal_steps else statistics.median(seconds[name])
        num_emitted = sum(run.metrics.num_emitted for run in runs[name])
        num_passes = sum(run.metrics.num_row_steps for run in runs[name])
        simulation = simulated[name]
        lengths = [int(info.num_drafted.max()) for run in runs[name] for info in run.infos]
        cells.append(
            {
                "batch": batch,
                "method": name,
                "tokens_per_s": round(num_emitted / median, 2),
                "ratios_to_regular": [round(a / b, 3) for a, b in zip(seconds["regular"], seconds[name], strict=True)],
                "tokens_per_pass": round(num_emitted / num_passes, 4),
                "mean_draft_len": round(float(np.mean(lengths)), 3),
                "seconds": round(float(median), 4),
                "simulated_seconds": round(float(simulation.seconds.sum()), 4),
                "simulated_tokens_per_pass": round(simulation.tokens_per_pass, 4),
                "is_identical": texts[name] == texts["regular"],
                "oracle_seconds": round(float(oracle.seconds.sum()), 4),
                "update_share": round(float(update / (median / len(lengths))), 5),
            }
        )
    return [cell | {"ratio_to_regular": round(cells[0]["seconds"] / cell["seconds"], 4)} for cell in cells]


def update_seconds(pair, policy, rows) -> float:
    """Returns the median time of a policy's update by itself, from dispatch until it is ready."""
    state = prefill(pair, rows, bass.SpecConfig(4), max_new_tokens=8)
    num_drafts = state.draft_lens
    info = no_step(len(state.lengths))._replace(
        is_active=~state.done, num_drafted=num_drafts, num_accepted=num_drafts // 2, num_emitted=num_drafts // 2 + 1
    )
    update, policy_state, found = jax.jit(advance_rows), policy.init(len(state.lengths)), []
    for _ in range(200):
        start = time.perf_counter()
        policy_state, _, num_wanted = update(policy, policy_state, rows_of(state), counts_of(info))
        jax.block_until_ready(num_wanted)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def tables(record) -> str:
    """Returns Markdown: the speed-ups, the simulator compared with the runs, and a summary."""
    cells = record["cells"]
    batches = sorted({cell["batch"] for cell in cells})
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    by_name = {(cell["batch"], cell["method"]): cell for cell in cells}

    def ratio(batch, method):
        return by_name[batch, method]["ratio_to_regular"]

    lines = ["| batch | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    for batch in batches:
        row = []
        for method in methods:
            ratios = by_name[batch, method]["ratios_to_regular"]
            row.append(f"{ratio(batch, method):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
        lines.append(f"| {batch} | " + " | ".join(row) + " |")
    lines += [
        "",
        "| batch | method | tokens per pass, run | simulated | seconds, run | simulated | error |",
        "|---" * 7 + "|",
    ]
    for cell in cells:
        error = cell["simulated_seconds"] / cell["seconds"] - 1
        lines.append(
            f"| {cell['batch']} | {cell['method']} | {cell['tokens_per_pass']:.3f} | "
            f"{cell['simulated_tokens_per_pass']:.3f} | {cell['seconds']:.2f} | {cell['simulated_seconds']:.2f} | "
            f"{error:+.1%} |"
        )
    fixed = [method for method in methods if method == "regular" or method.startswith("fixed")]
    worst = min(ratio(batch, "auto") / max(ratio(batch, method) for method in fixed) for batch in batches)
    errors = [abs(cell["simulated_seconds"] / cell["seconds"] - 1) for cell in cells]
    counts = [abs(cell["simulated_tokens_per_pass"] / cell["tokens_per_pass"] - 1) for cell in cells]
    lines += ["", f"* auto compared with the best fixed length, worst batch: {worst:.3f}x"]
    if "bass_heuristic" in methods:
        against = statistics.mean(ratio(batch, "auto") / ratio(batch, "bass_heuristic") for batch in batches)
        lines.append(f"* auto compared with bass_heuristic, mean over batches: {against:.3f}x")
    update = max(by_name[batch, "auto"]["update_share"] for batch in batches)
    lines += [
        f"* simulated seconds: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}",
        f"* simulated tokens per target pass: largest error {max(counts):.2%}",
        f"* an update of auto takes at most {update:.2%} of a mean step",
        f"* all tokens equal those of regular decoding: {all(cell['is_identical'] for cell in cells)}",
    ]
    return "\n".join(lines) + "\n"


def plot(record, path: Path) -> None:
    """Draws the speed-up over the batch size, with one line per method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(cell["method"] for cell in record["cells"]):
        found = [cell for cell in record["cells"] if cell["method"] == method]
        style = "-o" if method in ("auto", "bass_heuristic") else "--."
        axes.plot([cell["batch"] for cell in found], [cell["ratio_to_regular"] for cell in found], style, label=method)
    axes.set_xscale("log", base=2)
    batches = sorted({cell["batch"] for cell in record["cells"]})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="batch", ylabel="tokens/s over regular decoding", title=f"{record['device']}, {record['date']}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
