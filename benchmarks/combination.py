"""Fits the confidence scales of prompt lookup and of the datastore in `ensemble`, at temperature 0.

    python benchmarks/combination.py configs/distill/smollm2_quickstart.yaml --data-dir data --num-answers 500
    python benchmarks/combination.py configs/distill/smollm2_quickstart.yaml --data-dir data --held-out

At every token of the target's greedy answers, each part predicts the token and reports its confidence, given the
target's tokens before it. Up to the first rejected draft, drafts are these tokens. The runs in which the most confident
part is right are therefore what greedy speculation accepts, and other scales need no new drafting. Use answers that the
draft was not trained on.

Prints how often the token after a match of n tokens was right, and tokens per target pass by domain: of the parts, of
the ensemble as it is, and of ensembles with other scales. Nothing is timed. The last line is the result as JSON.
"""

import datetime
import itertools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from distillation import distillation_parser, overrides_of
from rich.table import Table

import bass_jax as bass
from bass_jax.cli.output import output_console
from bass_jax.drafters import DraftContext, Drafter, ModelDrafter
from bass_jax.drafters.ensemble import ensemble_drafter
from bass_jax.sampling import LogitsProcessors, SamplingParams
from bass_jax.training.agreement import accepted_runs
from bass_jax.training.batches import single_batches
from bass_jax.training.corpus import Corpus
from bass_jax.training.distill_config import load_distill_config
from bass_jax.training.draft_vocabulary import proposed_ids
from bass_jax.training.evaluate import write_held_out
from bass_jax.training.loss import response_logits
from bass_jax.training.prompts import prompt_source
from bass_jax.training.rollout import Rollout
from bass_jax.training.write_corpus import load_target

_GRAIN = 256


class Predictions(NamedTuple):
    """The drafts of a part at every token of an answer."""

    tokens: np.ndarray  # [n]
    confidence: np.ndarray  # [n], -1 without a draft


def main() -> None:
    parser = distillation_parser(__doc__)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--num-answers", type=int, default=500, help="greedy answers, spread over the corpus")
    parser.add_argument("--held-out", action="store_true", help="the answers to the held-out prompts, all of them")
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--lookup-scales", default="0.4,0.5,0.6,0.7,0.8")
    parser.add_argument("--retrieval-scales", default="0.2,0.3,0.4,0.5,0.6")
    options = parser.parse_args()

    config = load_distill_config(options.config, overrides_of(options) | {"held_out_temperatures": []})
    if options.held_out:
        corpus = write_held_out(config, prompt_source(config), *load_target(config, "float32"))
    else:
        corpus = Corpus(config.corpus_root / "corpus")
    answers = [(rollout, source) for rollout, source in corpus.read() if rollout.temperature == 0]
    if not options.held_out:
        answers = answers[:: max(1, len(answers) // options.num_answers)][: options.num_answers]

    network = bass.load_pair(options.pair, dtype="float32").drafter
    assert isinstance(network, ModelDrafter)
    ensemble = bass.load_pair(options.pair, drafter="ensemble", dtype="float32").drafter
    lookup, _, retrieval = ensemble.parts
    predictions = [
        (part_predictions(lookup, row), network_predictions(network, row), part_predictions(retrieval, row))
        for row, _ in answers
    ]
    shares = {n: accuracy_after_match(answers, predictions, n) for n in range(1, lookup.max_ngram + 1)}
    table = {n: share for n, share in shares.items() if share is not None}
    print("accuracy after a match of n tokens:", {n: round(share, 2) for n, share in table.items()}, flush=True)

    def measure(confidence_scale: tuple[float, float, float], sufficient_score: float) -> dict[str, float]:
        return mean_tokens_per_pass(answers, predictions, confidence_scale, sufficient_score, options.draft_len)

    small = ensemble_drafter(None, retrieval)
    found: dict[str, dict[str, float]] = {
        "lookup": measure((1.0, -1.0, -1.0), 1.0),
        "network": measure((-1.0, 1.0, -1.0), 1.0),
        "retrieval": measure((-1.0, -1.0, 1.0), 1.0),
        "ensemble": measure(tuple(ensemble.confidence_scale), ensemble.sufficient_score),
        "ensemble, no network": measure(
            (small.confidence_scale[0], -1.0, small.confidence_scale[1]), small.sufficient_score
        ),
    }
    sufficient = ensemble.sufficient_score / ensemble.confidence_scale[0]
    scales = itertools.product(*map(numbers, (options.lookup_scales, options.retrieval_scales)))
    for lookup_scale, retrieval_scale in scales:
        name = f"lookup {lookup_scale}, retrieval {retrieval_scale}"
        found[name] = measure((lookup_scale, 1.0, retrieval_scale), lookup_scale * sufficient)
        found[f"{name}, no network"] = measure((lookup_scale, -1.0, retrieval_scale), lookup_scale * sufficient)

    domains = sorted({source for _, source in answers})
    drawn = Table(title=f"tokens per target pass, draft length {options.draft_len}, temperature 0")
    for name in ("", "mean", *domains):
        drawn.add_column(name, justify="right" if name else "left")
    for name, values in found.items():
        drawn.add_row(name, *(f"{value:.3f}" for value in (np.mean(list(values.values())), *values.values())))
    output_console().print(drawn)
    described = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "draft_len": options.draft_len}
    print(json.dumps(described | {"answers": len(answers), "accuracy": table, "tokens_per_pass": found}))


def numbers(text: str) -> list[float]:
    return [float(value) for value in text.split(",")]


def mean_tokens_per_pass(
    answers, predictions, confidence_scale, sufficient_score: float, draft_len: int
) -> dict[str, float]:
    """Returns tokens per target pass by domain. Parts are in order; one with a negative scale is left out."""
    counts: dict[str, np.ndarray] = {}
    for (rollout, source), parts in zip(answers, predictions, strict=True):
        score, token = np.full(len(rollout.response), -1.0), np.full(len(rollout.response), -1)
        for part, scale in zip(parts, confidence_scale, strict=True):
            own = np.where(part.confidence < 0, -1.0, part.confidence * scale)
            is_new = (score < sufficient_score) & (own > score)
            score, token = np.where(is_new, own, score), np.where(is_new, part.tokens, token)
        counted = np.array([len(rollout.response), len(accepted_runs(token == rollout.response, draft_len))])
        counts[source] = counts.get(source, 0) + counted
    return {source: float(tokens / passes) for source, (tokens, passes) in sorted(counts.items())}


def accuracy_after_match(answers, predictions, num_matched: int) -> float | None:
    """Returns how often lookup was right after a match of so many tokens; None without one."""
    num_right, total = 0, 0
    for (rollout, _), (lookup, _, _) in zip(answers, predictions, strict=True):
        matched = np.round(2 * lookup.confidence / (1 - lookup.confidence))
        is_counted = (lookup.confidence > 0) & (matched == num_matched)
        num_right += int((lookup.tokens == rollout.response)[is_counted].sum())
        total += int(is_counted.sum())
    return num_right / total if total else None


def part_predictions(part: Drafter, rollout: Rollout) -> Predictions:
    """Returns the predictions of a part without a state, with one row per token of the answer."""
    sequence = np.concatenate([rollout.prompt, rollout.response]).astype(np.int32)
    num = len(rollout.response)
    tokens = np.zeros((-(-num // _GRAIN) * _GRAIN, -(-len(sequence) // _GRAIN) * _GRAIN), np.int32)
    tokens[:, : len(sequence)] = sequence
    lengths = np.minimum(len(rollout.prompt) + np.arange(len(tokens), dtype=np.int32), len(sequence))
    proposal = jax.device_get(_propose(part, tokens, lengths))
    confidence = np.where(proposal.num_drafted > 0, proposal.confidence[:, 0], -1.0)
    return Predictions(proposal.tokens[:num, 0], confidence[:num])


@jax.jit
def _propose(part: Any, tokens, lengths):
    num_rows = len(tokens)
    sampling_arrays = SamplingParams().sampling_arrays(num_rows, 1)
    processors = LogitsProcessors(None, lengths, jnp.full((num_rows, 1), -1))
    keys = jnp.broadcast_to(jax.random.key(0), (num_rows, 1))
    context = DraftContext(
        tokens, lengths, jnp.ones_like(lengths), sampling_arrays, keys, processors, jnp.zeros(num_rows)
    )
    return part.propose(part.init(tokens, lengths), context, 1, is_sampled=False)[0]


def network_predictions(drafter: ModelDrafter, rollout: Rollout) -> Predictions:
    """Returns the predictions of a network, from one pass over the prompt and the answer."""
    (batch,) = single_batches([rollout], drafter.model)
    best, confidence = jax.device_get(_predict(drafter.model, batch))
    num = len(rollout.response)
    return Predictions(proposed_ids(drafter.model)[best[:num]], confidence[:num])


@jax.jit
def _predict(draft, batch):
    distribution = jax.nn.softmax(response_logits(draft, batch).astype(jnp.float32), axis=-1)
    return jnp.argmax(distribution, axis=-1), distribution.max(axis=-1)


if __name__ == "__main__":
    main()
