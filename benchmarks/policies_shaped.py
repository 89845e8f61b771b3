"""Profiles a pair with given shapes, random weights and forced acceptance, and compares policies on it.

    python benchmarks/policies_shaped.py --target 7b --draft 1b --acceptance 0.8 --batches 1,2,4,8,16,32

It needs no checkpoint. The times are real, the texts are not: the rule ``synthetic(…)`` decides what is accepted.
Prints the measured times, the errors of both fits, and the speed-up of every policy over regular decoding in the same
run. The last line is all of it as JSON.
"""

import argparse
import json
import statistics

import jax
import numpy as np

import bass_jax as bass
from bass_jax import policies
from bass_jax.analysis.profiler import measure_costs
from bass_jax.cost_model import Profile, pass_shape
from bass_jax.drafters import ModelDrafter
from bass_jax.models import AttentionConfig, DenseMLP, LayerConfig


def _llama(width, num_layers, attention, mlp_width, vocab_size=32000, is_tied=True) -> bass.models.ModelConfig:
    layer = LayerConfig(AttentionConfig(*attention), DenseMLP(mlp_width))
    return bass.models.ModelConfig(vocab_size, width, 8192, (layer,) * num_layers, is_tied=is_tied, dtype="bfloat16")


SHAPES = {
    "7b": _llama(4096, 32, (32, 32, 128), 11008, is_tied=False),
    "1b": _llama(2048, 16, (32, 8, 64), 8192),
    "tiny": _llama(64, 2, (2, 2, 32), 128, vocab_size=512),
}
LENGTHS = (0, 1, 2, 3, 4, 6, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--draft", default="1b", choices=sorted(SHAPES))
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--context", type=int, default=472)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    target, draft = (
        bass.models.init_model(SHAPES[name], jax.random.key(seed))
        for seed, name in enumerate((options.target, options.draft))
    )
    pair = bass.Pair(target, ModelDrafter(draft, target.config.vocab_size))
    batches = [int(batch) for batch in options.batches.split(",")]
    spec = bass.SpecConfig(8, f"synthetic({options.acceptance})")
    contexts = (options.context,)
    table = measure_costs(pair, spec, batches=batches, draft_lens=LENGTHS, contexts=contexts, on_cell=print)
    rates = (options.acceptance,) * LENGTHS[-1]
    profile = Profile({}, table, rates, pass_shape(target.config), pass_shape(draft.config))
    print("milliseconds:", (1e3 * np.asarray(table.target)[:, :, 0]).round(2).tolist())
    print("drafts, milliseconds:", (1e3 * np.asarray(table.next_draft)[:, 0]).round(3).tolist())
    print("fit errors:", profile.fit_errors())
    methods = {
        "regular": policies.fixed(0),
        **{f"fixed {length}": policies.fixed(length) for length in (2, 4, 8)},
        "bass_heuristic": policies.bass_heuristic(limit=8),
        "batch_table": policies.batch_table(profile=profile, lengths=LENGTHS),
        "auto": policies.auto(profile=profile, lengths=LENGTHS),
        "bandit": policies.bandit(lengths=LENGTHS),
    }
    cells = [cell for batch in batches for cell in measure(options, pair, spec, methods, batch)]
    record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "fit_errors": profile.fit_errors()}
    print(json.dumps(record | vars(options) | {"cells": cells, "is_synthetic": True}))


def measure(options, pair, spec, methods, batch) -> list[dict]:
    """Returns the median tokens per second of each method; the methods take turns."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, pair.target.config.vocab_size, (batch, options.context)).tolist()
    decode_options = bass.DecodeOptions(max_new_tokens=options.max_new_tokens, stop_tokens=())
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(-1, options.repeats):  # the first round compiles
        for name, policy in methods.items():
            key = jax.random.key(repeat + 1)
            run = bass.generate(pair, prompts, spec, decode_options, policy=policy, key=key)
            if repeat >= 0:
                rates[name].append(run.tokens_per_second)
    regular = statistics.median(rates["regular"])
    cells = []
    for name, found in rates.items():
        median = statistics.median(found)
        cells.append(
            {"batch": batch, "method": name, "tokens_per_s": round(median, 1), "speed_up": round(median / regular, 3)}
        )
        print(cells[-1], flush=True)
    return cells


if __name__ == "__main__":
    main()
