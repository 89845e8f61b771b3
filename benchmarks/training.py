r"""Tokens per second of a distillation's training steps with several sets of options, in turns.

    python benchmarks/training.py configs/distill/smollm2_quickstart.yaml --data-dir data \
        --methods "training.product_dtype=float32 training.product_dtype=bfloat16"

A method is a comma-separated list of overrides of the configuration. All methods begin with the same draft and take the
same steps, on batches of the most frequent lengths of the corpus, which must exist. The time of a step is weighted by
the frequency of its length. The first turn is not timed. Nothing is written. The last line is the table as JSON.
"""

import collections
import dataclasses
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

from bass_jax.cli.output import output_console
from bass_jax.training.batches import TrainingBatch, epoch_batches
from bass_jax.training.data import corpus_rows
from bass_jax.training.distill import new_draft
from bass_jax.training.distill_config import DistillConfig, load_distill_config
from bass_jax.training.draft_vocabulary import output_columns, proposed_ids
from bass_jax.training.loss import weights_at
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.prompts import prompt_source
from bass_jax.training.trainer import TrainState, differentiated_config, rows_with_hidden, train_step
from bass_jax.training.write_corpus import load_target


class Method(NamedTuple):
    """A set of options, and the batches of each length that it is timed on."""

    config: DistillConfig
    batches: dict[int, list[TrainingBatch]]
    shares: dict[int, float]  # of the epoch's batches


def main() -> None:
    parser = distillation_parser(__doc__)
    parser.add_argument("--methods", default="training.product_dtype=float32", help="separated by spaces")
    parser.add_argument("--num-lengths", type=int, default=3)
    parser.add_argument("--num-batches", type=int, default=3, help="of each length")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()

    overrides = overrides_of(options)
    names = options.methods.split()
    config = load_distill_config(options.config, overrides)
    source = prompt_source(config)
    target, tokenizer = load_target(config, "float32")
    rows = corpus_rows(config, source, tokenizer)
    draft = new_draft(config, source, rows, target, tokenizer)
    trained = rows.trained(rows.shards())
    if draft.config.hidden_width is not None:
        trained = rows_with_hidden(trained)

    methods, steps = {}, {}
    for name in names:
        changes = dict(change.split("=") for change in name.split(","))
        changed = load_distill_config(options.config, overrides | changes)
        methods[name] = with_batches(changed, trained, draft, options.num_lengths, options.num_batches)
        steps[name] = stepper(changed, draft)

    seconds: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for turn, (name, method) in itertools.product(range(options.turns + 1), methods.items()):
        for length, batches in method.batches.items():
            for batch in batches:
                start = time.perf_counter()
                steps[name](batch)
                if turn:
                    seconds[name, length].append(time.perf_counter() - start)
        print(f"turn {turn}: {name}", flush=True)

    table = Table("method", "ms per step by length: median (minimum-maximum)", "response tokens/s", "with prompts")
    found = {}
    for name, method in methods.items():
        mean = np.zeros(3)  # Seconds, response tokens and all tokens of a step.
        for length, share in method.shares.items():
            counts = np.mean([(batch.weights.sum(), batch.lengths.sum()) for batch in method.batches[length]], axis=0)
            mean += share * np.array([np.median(seconds[name, length]), *counts])
        rates = [float(tokens / mean[0]) for tokens in mean[1:]]
        times = {length: [1e3 * f(seconds[name, length]) for f in (np.median, min, max)] for length in method.batches}
        found[name] = {"response": rates[0], "with_prompts": rates[1], "milliseconds": times}
        texts = [f"{length}: {median:.0f} ({low:.0f}-{high:.0f})" for length, (median, low, high) in times.items()]
        table.add_row(name, ", ".join(texts), *(f"{rate:,.0f}" for rate in rates))
    output_console().print(table)
    date = datetime.date.today().isoformat()
    print(json.dumps({"date": date, "jax": jax.__version__, "device": jax.devices()[0].device_kind, "methods": found}))


def with_batches(config: DistillConfig, rows, draft, num_lengths: int, num_batches: int) -> Method:
    """Returns the first batches of the most frequent lengths."""
    options, by_length = config.training, collections.defaultdict(list)
    batches = epoch_batches(
        rows,
        output_columns(proposed_ids(draft), draft.config.vocab_size),
        batch_tokens=options.batch_tokens,
        length_grain=options.length_grain,
        seed=(config.seed, 0),
        reads_hidden=draft.config.hidden_width is not None,
    )
    counts: collections.Counter[int] = collections.Counter()
    for batch in batches:
        length = batch.tokens.shape[1]
        counts[length] += 1
        if len(by_length[length]) < num_batches:
            by_length[length].append(batch)
    chosen = dict(counts.most_common(num_lengths))
    shares = {length: count / sum(chosen.values()) for length, count in chosen.items()}
    return Method(config, {length: by_length[length] for length in chosen}, shares)


def stepper(config: DistillConfig, draft):
    """Returns a function that takes one step of the optimizer and waits for it."""
    optimizer = make_optimizer(config.optimizer, config.training.num_steps)
    params = {name: leaf for name, leaf in draft.params.items() if name != "embedding"}
    state = TrainState(
        jax.tree.map(jnp.array, params), jax.jit(optimizer.init)(params)
    )  # A copy, because a step donates it.
    embedding, weights = draft.params["embedding"].astype(config.training.dtype), weights_at(config.loss, 0.0)
    step_draft = dataclasses.replace(draft, params={}, config=differentiated_config(config.training, draft.config))

    def step(batch: TrainingBatch) -> None:
        nonlocal state
        state, *rest = train_step(config.loss.unroll, optimizer, step_draft, state, embedding, batch, weights)
        jax.block_until_ready((state, rest))

    return step


if __name__ == "__main__":
    main()
