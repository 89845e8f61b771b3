r"""Draft-length policies against fixed lengths and regular decoding, over the batch, and the simulator beside them.

    python benchmarks/policies.py --file HumanEval.jsonl.gz \
        --template 'Complete the following Python function:\n```python\n{prompt}```' --output policies

First the pair is profiled (costs, and acceptance on prompts of its own); then, greedily, batches of other prompts are
decoded by every way in turn, `--repeats` times: all ways of a cell share its minutes. A exhaustive run of the same
prompts is simulated with the profile's costs, and its tokens per target pass and seconds are held against what was
measured. Compilation and prefill are outside the times. A step does the same work in every repeat, so its time is its
median over the repeats, and a way's seconds are the sum of those: a burst of something else on the machine costs a step
and not a run. Writes OUTPUT.json after every cell, then OUTPUT.md and OUTPUT.png; twenty minutes on two cores, and
twice that on slow ones.
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
from bass_jax.decoding.policy_runner import PolicyRunner
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.traces import TraceWriter, read_trace
from bass_jax.engine.generate import GenerateLoop, begin_trace

LENGTHS = (0, 1, 2, 4)
"""What policies choose from; the profile knows 8 too, for those that grow."""


def main() -> None:
    parser = prompt_parser(__doc__)
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--num-prompts", type=int, default=16, help="of the largest batch; fewer for small ones")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="of this pair on this machine, instead of measuring one now")
    parser.add_argument("--ways", help="of the table's columns, by comma, instead of all; regular comes first")
    parser.add_argument("--bandit", action="store_true", help="measure it too; the simulator has no clock for it")
    parser.add_argument("--output", type=Path, default=Path("policies"))
    options = parser.parse_args()

    pair, tokenizer = bass.load_pair(options.pair)
    encoded = encode_prompts(options, tokenizer)
    # One capacity bucket for all: what was profiled is what runs.
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
            pair, profiled, bass.SpecConfig(8), name=options.pair, max_new_tokens=64, batches=batches,
            draft_lens=(*LENGTHS, 8), contexts=(216,), on_cell=lambda cell: print(f"profile: {cell}", flush=True),
        )  # fmt: skip
    profile.write(options.output.with_suffix(".profile.json"))
    replay, exhaustive_seconds = exhaustive(options, pair, decoded)
    ways = {
        "regular": policies.fixed(0),
        **{f"fixed {length}": policies.fixed(length) for length in LENGTHS[1:]},
        "bass_heuristic": policies.bass_heuristic(),
        "batch_table": policies.batch_table(profile=profile, lengths=LENGTHS),
        "goodput": policies.goodput(profile=profile, lengths=LENGTHS),
        "confidence": policies.confidence(max_len=4),
        **({"bandit": policies.bandit(lengths=LENGTHS)} if options.bandit else {}),
    }
    if options.ways is not None:
        ways = {name: ways[name] for name in options.ways.split(",")}
    record = {
        "date": datetime.date.today().isoformat(), "jax": jax.__version__, "device": jax.devices()[0].device_kind,
        "machine": platform.machine(), "num_cores": os.cpu_count(), "max_new_tokens": options.max_new_tokens,
        "num_prompts": len(decoded), "fit_errors": profile.fit_errors(), "rates": profile.rates,
        "profile_seconds": time.perf_counter() - start - exhaustive_seconds, "exhaustive_seconds": exhaustive_seconds, "cells": [],
    }  # fmt: skip
    for batch in batches:
        rows = decoded[: min(max(2 * batch, 4), options.num_prompts)]
        record["cells"] += measure(options, pair, ways, rows, batch, replay, profile)
        options.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["cells"][-len(ways) :]), flush=True)
    record["seconds"] = time.perf_counter() - start
    options.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(tables(record))
    plot(record, options.output.with_suffix(".png"))
    print(tables(record))


def exhaustive(options, pair, rows):
    """Records every position of the decoded texts once, as one batch."""
    path = options.output.with_suffix(".trace.jsonl")
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    run = GenerateLoop(
        pair, rows, bass.SpecConfig(8, record_drafts=True), max_new_tokens=options.max_new_tokens, step="exhaustive"
    )  # fmt: skip
    with TraceWriter(path) as trace:
        begin_trace(trace, run)
        for info in run:
            trace.step(info, run.step_seconds[-1], len(rows))
        trace.end()
    return make_replay(read_trace(path)), time.perf_counter() - start


def measure(options, pair, ways, rows, batch, replay, profile) -> list[dict]:
    """One cell per way: medians over the repeats, the ways in turn, and each simulated."""
    seconds = {name: [] for name in ways}
    steps: dict[str, list[list[float]]] = {name: [] for name in ways}
    runs = {name: [] for name in ways}
    texts: dict[str, list] = {name: [] for name in ways}
    for repeat in range(-1, options.repeats):  # the first compiles, and warms
        for name, policy in ways.items():
            times: list[float] = []
            for start in range(0, len(rows), batch):
                if repeat < 0 and start:
                    break
                run = bass.generate(
                    pair, rows[start : start + batch], bass.SpecConfig(4), policy=policy,
                    max_new_tokens=options.max_new_tokens, warm_up=False,
                )  # fmt: skip
                times += run.timings.steps
                if repeat == 0:
                    runs[name].append(run)
                    texts[name] += [row.tolist() for row in run.tokens]
            if repeat >= 0:
                seconds[name].append(sum(times))
                steps[name].append(times)
    update = update_seconds(pair, ways["goodput"], rows[:batch])
    batches = compose(len(rows), batch)
    simulated = {name: simulate(replay, policy, profile.table, batches) for name, policy in ways.items()}
    oracle = regret(replay, {}, profile.table, batches, range(9))["oracle"][0]
    cells = []
    for name in ways:
        # The bandit's steps are others every time.
        alike = len({len(times) for times in steps[name]}) == 1
        median = float(np.median(steps[name], axis=0).sum()) if alike else statistics.median(seconds[name])
        num_emitted = sum(run.summary.num_emitted for run in runs[name])
        num_passes = sum(run.summary.num_row_steps for run in runs[name])
        one = simulated[name]
        lengths = np.concatenate([[int(info.num_drafted.max()) for info in run.infos] for run in runs[name]])
        cells.append({
            "batch": batch, "way": name, "tokens_per_s": round(num_emitted / median, 2),
            "ratios_to_regular": [round(a / b, 3) for a, b in zip(seconds["regular"], seconds[name], strict=True)],
            "tokens_per_pass": round(num_emitted / num_passes, 4), "mean_draft_len": round(float(lengths.mean()), 3),
            "seconds": round(median, 4), "simulated_seconds": round(float(one.seconds.sum()), 4),
            "simulated_tokens_per_pass": round(one.block_efficiency, 4),
            "is_identical": texts[name] == texts["regular"],
            "oracle_seconds": round(float(oracle.seconds.sum()), 4),
            "update_share": round(update / (median / sum(len(run.infos) for run in runs[name])), 5),
        })  # fmt: skip
    return [cell | {"ratio_to_regular": round(cells[0]["seconds"] / cell["seconds"], 4)} for cell in cells]


def update_seconds(pair, policy, rows) -> float:
    """Median time of a policy's update by itself, dispatched and waited for."""
    state = prefill(pair, rows, bass.SpecConfig(4), max_new_tokens=8)
    policy_runner, found = PolicyRunner(policy, state), []
    info = bass.StepInfo(*([None] * len(bass.StepInfo._fields)))._replace(
        is_active=~state.done, num_drafted=state.draft_lens, num_accepted=state.draft_lens // 2,
        num_emitted=state.draft_lens // 2 + 1,
    )  # fmt: skip
    for _ in range(200):
        start = time.perf_counter()
        policy_runner.update(state, info, 0.02)
        jax.block_until_ready(policy_runner.num_wanted)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def tables(record) -> str:
    """Markdown: speed-ups, then the simulator against the runs, then the results."""
    cells = record["cells"]
    batches = sorted({cell["batch"] for cell in cells})
    ways = list(dict.fromkeys(cell["way"] for cell in cells))
    by = {(cell["batch"], cell["way"]): cell for cell in cells}

    def ratio(batch, way):
        return by[batch, way]["ratio_to_regular"]

    lines = ["| batch | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for batch in batches:
        row = [f"{ratio(batch, way):.2f}x ({min(by[batch, way]['ratios_to_regular']):.2f}-"
               f"{max(by[batch, way]['ratios_to_regular']):.2f})" for way in ways]  # fmt: skip
        lines.append(f"| {batch} | " + " | ".join(row) + " |")
    lines += [
        "",
        "| batch | way | tokens per pass, run | simulated | seconds, run | simulated | error |",
        "|---" * 7 + "|",
    ]
    for cell in cells:
        error = cell["simulated_seconds"] / cell["seconds"] - 1
        lines.append(
            f"| {cell['batch']} | {cell['way']} | {cell['tokens_per_pass']:.3f} | "
            f"{cell['simulated_tokens_per_pass']:.3f} | {cell['seconds']:.2f} | {cell['simulated_seconds']:.2f} | "
            f"{error:+.1%} |"
        )
    fixed = [way for way in ways if way == "regular" or way.startswith("fixed")]
    worst = min(ratio(batch, "goodput") / max(ratio(batch, way) for way in fixed) for batch in batches)
    errors = [abs(cell["simulated_seconds"] / cell["seconds"] - 1) for cell in cells]
    counts = [abs(cell["simulated_tokens_per_pass"] / cell["tokens_per_pass"] - 1) for cell in cells]
    mine = [by[batch, "goodput"] for batch in batches]
    lines += ["", f"* goodput against the best of no drafts and fixed lengths, worst batch: {worst:.3f}x"]
    if "bass_heuristic" in ways:
        against = statistics.mean(ratio(batch, "goodput") / ratio(batch, "bass_heuristic") for batch in batches)
        lines.append(f"* goodput against bass_heuristic, mean over batches: {against:.3f}x")
    lines += [
        f"* simulated seconds: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}",
        f"* simulated tokens per target pass: largest error {max(counts):.2%}",
        f"* goodput's update: at most {max(cell['update_share'] for cell in mine):.2%} of a mean step of its own",
        f"* all tokens those of regular decoding: {all(cell['is_identical'] for cell in cells)}",
    ]
    return "\n".join(lines) + "\n"


def plot(record, path: Path) -> None:
    """Speed-up over the batch, a line per way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in dict.fromkeys(cell["way"] for cell in record["cells"]):
        mine = [cell for cell in record["cells"] if cell["way"] == way]
        speed = [cell["ratio_to_regular"] for cell in mine]
        style = "-o" if way in ("goodput", "bass_heuristic") else "--."
        axes.plot([cell["batch"] for cell in mine], speed, style, label=way)
    axes.set_xscale("log", base=2)
    batches = sorted({cell["batch"] for cell in record["cells"]})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set(xlabel="batch", ylabel="tokens/s over regular decoding", title=f"{record['device']}, {record['date']}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
