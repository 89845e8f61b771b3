"""What lookup's word and the store's should count beside a network's in `combined`, at temperature 0.

    python benchmarks/combination.py configs/distill/smollm2_quickstart.yaml --data-dir data --num-answers 500
    python benchmarks/combination.py configs/distill/smollm2_quickstart.yaml --data-dir data --held-out

Every part says at every token of the target's greedy answers, given the target's own tokens before it, what it would
draft and how sure it is. Up to the first that is rejected, drafts are those tokens; so the runs in which the most
confident part is right are what greedy speculation accepts, and any trust can be tried without drafting again. Printed:
how often what followed a match of n tokens was right; tokens per target pass, domain by domain, of the parts, of the
combination as it is, and of others. Take answers that the draft was not trained on. Nothing is timed. The last line is
the result as JSON.
"""

import datetime
import functools
import itertools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from distillation import distillation_parser, overrides_of
from rich.table import Table

import bass_jax as bass
from bass_jax.cli.arguments import output_console
from bass_jax.drafters import DraftContext, Drafter, ModelDrafter
from bass_jax.drafters.ensemble import ensemble_drafter
from bass_jax.sampling import LogitsProcessors, SamplingParams
from bass_jax.training.agreement import accepted_runs
from bass_jax.training.batches import single_batches
from bass_jax.training.distill_config import load_config
from bass_jax.training.draft_vocabulary import proposed_ids
from bass_jax.training.held_out import write_held_out
from bass_jax.training.loss import scored_logits
from bass_jax.training.rollout import Rollout
from bass_jax.training.write_corpus import load_target, open_corpus

_GRAIN = 256


class Said(NamedTuple):
    """What a part would draft at every token of an answer."""

    tokens: np.ndarray  # [n]
    confidence: np.ndarray  # [n], -1 where it drafts nothing


def main() -> None:
    parser = distillation_parser(__doc__)
    parser.add_argument("--pair", default="checkpoints/quickstart")
    parser.add_argument("--num-answers", type=int, default=500, help="greedy answers, spread over the corpus")
    parser.add_argument("--held-out", action="store_true", help="the answers to the held-out prompts, all of them")
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--lookup-scales", default="0.4,0.5,0.6,0.7,0.8")
    parser.add_argument("--retrieval-scales", default="0.2,0.3,0.4,0.5,0.6")
    options = parser.parse_args()

    config = load_config(options.config, overrides_of(options) | {"held_out_temperatures": []})
    corpus = write_held_out(config, *load_target(config, "float32")) if options.held_out else open_corpus(config)
    answers = [(rollout, source) for rollout, source in corpus.read() if rollout.temperature == 0]
    if not options.held_out:
        answers = answers[:: max(1, len(answers) // options.num_answers)][: options.num_answers]

    pair, _ = bass.load_pair(options.pair, dtype="float32")
    assert isinstance(pair.drafter, ModelDrafter)
    shipped = bass.load_pair(options.pair, drafter="combined", dtype="float32")[0].drafter
    lookup, _, store = shipped.parts
    said = [
        (part_said(lookup, rollout), network_said(pair.drafter, rollout), part_said(store, rollout))
        for rollout, _ in answers
    ]
    table = {n: share for n in range(1, lookup.max_ngram + 1) if (share := right_behind(answers, said, n)) is not None}
    print("right behind a match of n tokens:", {n: round(share, 2) for n, share in table.items()}, flush=True)

    def worth(confidence_scale: tuple[float, float, float], enough: float) -> dict[str, float]:
        return block_efficiencies(answers, said, confidence_scale, enough, options.draft_len)

    alone = ensemble_drafter(None, store)
    found: dict[str, dict[str, float]] = {
        "lookup": worth((1.0, -1.0, -1.0), 1.0),
        "network": worth((-1.0, 1.0, -1.0), 1.0),
        "store": worth((-1.0, -1.0, 1.0), 1.0),
        "combined": worth(tuple(shipped.confidence_scale), shipped.sufficient_score),
        "combined, no network": worth(
            (alone.confidence_scale[0], -1.0, alone.confidence_scale[1]), alone.sufficient_score
        ),
    }
    sure = shipped.sufficient_score / shipped.confidence_scale[0]
    for looked, stored in itertools.product(*map(numbers, (options.lookup_scales, options.retrieval_scales))):
        found[f"lookup {looked}, store {stored}"] = worth((looked, 1.0, stored), looked * sure)
        found[f"lookup {looked}, store {stored}, no network"] = worth((looked, -1.0, stored), looked * sure)

    domains = sorted({source for _, source in answers})
    drawn = Table(title=f"tokens per target pass, draft length {options.draft_len}, temperature 0")
    for name in ("", "mean", *domains):
        drawn.add_column(name, justify="right" if name else "left")
    for name, values in found.items():
        drawn.add_row(name, *(f"{value:.3f}" for value in (np.mean(list(values.values())), *values.values())))
    output_console().print(drawn)
    described = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "draft_len": options.draft_len}
    print(json.dumps(described | {"answers": len(answers), "right": table, "tokens_per_pass": found}))


def numbers(text: str) -> list[float]:
    return [float(value) for value in text.split(",")]


def block_efficiencies(answers, said, confidence_scale, enough: float, draft_len: int) -> dict[str, float]:
    """Tokens per target pass by domain; parts in order, one of negative trust is left out."""
    counts: dict[str, np.ndarray] = {}
    for (rollout, source), parts in zip(answers, said, strict=True):
        worth, token = np.full(len(rollout.response), -1.0), np.full(len(rollout.response), -1)
        for part, share in zip(parts, confidence_scale, strict=True):
            own = np.where(part.confidence < 0, -1.0, part.confidence * share)
            is_new = (worth < enough) & (own > worth)
            worth, token = np.where(is_new, own, worth), np.where(is_new, part.tokens, token)
        counted = np.array([len(rollout.response), len(accepted_runs(token == rollout.response, draft_len))])
        counts[source] = counts.get(source, 0) + counted
    return {source: float(tokens / passes) for source, (tokens, passes) in sorted(counts.items())}


def right_behind(answers, said, num_matched: int) -> float | None:
    """How often what followed a match of so many tokens, or of the most that are tried, was the target's token."""
    right, total = 0, 0
    for (rollout, _), (looked, _, _) in zip(answers, said, strict=True):
        behind = np.round(2 * looked.confidence / (1 - looked.confidence))
        is_meant = (looked.confidence > 0) & (behind == num_matched)
        right, total = right + int((looked.tokens == rollout.response)[is_meant].sum()), total + int(is_meant.sum())
    return right / total if total else None


def part_said(part: Drafter, rollout: Rollout) -> Said:
    """Of a part that keeps nothing: every token of the answer is a row."""
    sequence = np.concatenate([rollout.prompt, rollout.response]).astype(np.int32)
    num = len(rollout.response)
    tokens = np.zeros((-(-num // _GRAIN) * _GRAIN, -(-len(sequence) // _GRAIN) * _GRAIN), np.int32)
    tokens[:, : len(sequence)] = sequence
    lengths = np.minimum(len(rollout.prompt) + np.arange(len(tokens), dtype=np.int32), len(sequence))
    proposal = jax.device_get(_propose(part, tokens, lengths))
    confidence = np.where(proposal.num_drafted > 0, proposal.confidence[:, 0], -1.0)
    return Said(proposal.tokens[:num, 0], confidence[:num])


@jax.jit
def _propose(part: Any, tokens, lengths):
    num_rows = len(tokens)
    sampling_arrays, processors = (
        SamplingParams().sampling_arrays(num_rows, 1),
        LogitsProcessors(None, lengths, jnp.full((num_rows, 1), -1)),
    )
    keys = jnp.broadcast_to(jax.random.key(0), (num_rows, 1))
    context = DraftContext(
        tokens, lengths, jnp.ones_like(lengths), sampling_arrays, keys, processors, jnp.zeros(num_rows)
    )
    return part.propose(part.init(tokens, lengths), context, 1, is_sampled=False)[0]


def network_said(drafter: ModelDrafter, rollout: Rollout) -> Said:
    """In one pass over the prompt and the answer."""
    (batch,) = single_batches([rollout], drafter.model)
    best, confidence = jax.device_get(_predict(drafter.model.config, drafter.model.params, batch))
    num = len(rollout.response)
    return Said(proposed_ids(drafter.model)[best[:num]], confidence[:num])


@functools.partial(jax.jit, static_argnums=0)
def _predict(config, params, batch):
    distribution = jax.nn.softmax(scored_logits(config, params, batch).astype(jnp.float32), axis=-1)
    return jnp.argmax(distribution, axis=-1), distribution.max(axis=-1)


if __name__ == "__main__":
    main()
