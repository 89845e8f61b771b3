r"""Tokens per second of a distillation's training steps, in turns with other options.

    python benchmarks/training.py configs/distill/smollm2_quickstart.yaml --data-dir data \
        --ways "training.product_dtype=float32 training.product_dtype=bfloat16"

A way is a comma-separated list of overrides of the configuration. All ways start from the same draft and take the same
steps on batches of the commonest lengths of the corpus, which must be there; what a step costs is weighed by how often
its length comes. The first turn is not timed. Nothing is written. The last line is the table as JSON.
"""

import collections
import datetime
import itertools
import json
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from distillation import distillation_parser, overrides_of
from rich.table import Table

from bass_jax.cli.arguments import output_console
from bass_jax.training.batches import Batch, epoch_batches
from bass_jax.training.data import corpus_rows
from bass_jax.training.distill import new_draft
from bass_jax.training.distill_config import DistillConfig, load_config
from bass_jax.training.draft_vocabulary import output_columns, proposed_ids
from bass_jax.training.loss import weights_at
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.trainer import TrainState, passes_config, train_step, with_features
from bass_jax.training.write_corpus import load_target


class Way(NamedTuple):
    """A way to train, and the batches of each length that it is timed on."""

    config: DistillConfig
    batches: dict[int, list[Batch]]
    shares: dict[int, float]  # of the epoch's batches


def main() -> None:
    parser = distillation_parser(__doc__)
    parser.add_argument("--ways", default="training.product_dtype=float32", help="separated by spaces")
    parser.add_argument("--num-lengths", type=int, default=3)
    parser.add_argument("--num-batches", type=int, default=3, help="of each length")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()

    overrides = overrides_of(options)
    names = options.ways.split()
    config = load_config(options.config, overrides)
    target, tokenizer = load_target(config, "float32")
    rows = corpus_rows(config, tokenizer)
    draft = new_draft(config, rows, target, tokenizer)
    trained = rows.trained(rows.shards())
    if draft.config.hidden_width is not None:
        trained = with_features(trained)

    ways, steps = {}, {}
    for name in names:
        changed = load_config(options.config, overrides | dict(change.split("=") for change in name.split(",")))
        ways[name] = with_batches(changed, trained, draft, options.num_lengths, options.num_batches)
        steps[name] = stepper(changed, draft)

    seconds: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for turn, (name, way) in itertools.product(range(options.turns + 1), ways.items()):
        for length, batches in way.batches.items():
            for batch in batches:
                start = time.perf_counter()
                steps[name](batch)
                if turn:
                    seconds[name, length].append(time.perf_counter() - start)
        print(f"turn {turn}: {name}", flush=True)

    table = Table("way", "ms per step, by length: median (least to most)", "response tokens/s", "with prompts")
    found = {}
    for name, way in ways.items():
        mean = np.zeros(3)  # Seconds, response tokens and all tokens of a step.
        for length, share in way.shares.items():
            counts = np.mean([(batch.weights.sum(), batch.lengths.sum()) for batch in way.batches[length]], axis=0)
            mean += share * np.array([np.median(seconds[name, length]), *counts])
        rates = [float(tokens / mean[0]) for tokens in mean[1:]]
        spread = {length: [1e3 * f(seconds[name, length]) for f in (np.median, min, max)] for length in way.batches}
        found[name] = {"response": rates[0], "with_prompts": rates[1], "milliseconds": spread}
        told = ", ".join(f"{length}: {mid:.0f} ({low:.0f}-{high:.0f})" for length, (mid, low, high) in spread.items())
        table.add_row(name, told, *(f"{rate:,.0f}" for rate in rates))
    output_console().print(table)
    date = datetime.date.today().isoformat()
    print(json.dumps({"date": date, "jax": jax.__version__, "device": jax.devices()[0].device_kind, "ways": found}))


def with_batches(config: DistillConfig, rows, draft, num_lengths: int, num_batches: int) -> Way:
    """The first batches of the commonest lengths."""
    options, by_length = config.training, collections.defaultdict(list)
    batches = epoch_batches(
        rows, output_columns(proposed_ids(draft), draft.config.vocab_size), batch_tokens=options.batch_tokens,
        length_grain=options.length_grain, seed=(config.seed, 0), reads_hidden=draft.config.hidden_width is not None,
    )  # fmt: skip
    counts: collections.Counter[int] = collections.Counter()
    for batch in batches:
        length = batch.tokens.shape[1]
        counts[length] += 1
        if len(by_length[length]) < num_batches:
            by_length[length].append(batch)
    chosen = dict(counts.most_common(num_lengths))
    shares = {length: count / sum(chosen.values()) for length, count in chosen.items()}
    return Way(config, {length: by_length[length] for length in chosen}, shares)


def stepper(config: DistillConfig, draft):
    """Takes one step of the optimizer after the other, and waits for each."""
    optimizer = make_optimizer(config.optimizer, config.training.num_steps)
    params = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    state = TrainState(jax.tree.map(jnp.array, params), jax.jit(optimizer.init)(params))  # Donated: of its own.
    embedding, weights = draft.params["embedding"].astype(config.training.dtype), weights_at(config.loss, 0.0)
    passes = passes_config(config.training, draft.config)

    def step(batch: Batch) -> None:
        nonlocal state
        state, *rest = train_step(passes, config.loss.unroll, optimizer, state, embedding, batch, weights)
        jax.block_until_ready((state, rest))

    return step


if __name__ == "__main__":
    main()
