"""The target's answers to held-out prompts, and how well a draft predicts them."""

from collections.abc import Sequence

import jax

from bass_jax.checkpoint import Tokenizer
from bass_jax.drafters.eagle.eagle3 import Eagle3Model
from bass_jax.models import Model
from bass_jax.training.agreement import Agreement, measure_agreement, sampled_acceptance
from bass_jax.training.corpus import Corpus
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.init_draft import Draft
from bass_jax.training.prompts import PromptSource
from bass_jax.training.rollout import Rollout, batches_by_length, roll_out, with_hidden

_BATCH = 32

HELD_OUT = "held_out"
"""Name of the directory of the answers, next to the corpus."""


def write_held_out(config: DistillConfig, source: PromptSource, target: Model, tokenizer: Tokenizer) -> Corpus:
    """Lets the target answer the held-out prompts, greedily and at the configured temperatures.

    A second call continues an interrupted one.

    Args:
        config: of the distillation; ``held_out/`` is written next to its corpus.
        source: the held-out prompts.
        target: the target, in the dtype that it will be used in.
        tokenizer: with a chat template.

    Raises:
        ValueError: if the directory holds answers to other prompts.
    """
    prompts = source.held_out()
    description = {
        "target": config.target,
        "max_new_tokens": config.rollout.max_new_tokens,
        "prompts": [list(prompt) for prompt in prompts],
    }
    corpus = Corpus(config.corpus_root / HELD_OUT, description)
    encoded = [tokenizer.encode_chat(prompt.text) for prompt in prompts]
    done = {(_rounded(row.temperature), row.prompt.tobytes()) for row, _ in corpus.read()}
    number = len(corpus.shards())
    for temperature in (0.0, *config.held_out_temperatures):
        for chosen in batches_by_length([len(ids) for ids in encoded], _BATCH, len(encoded)):
            if all((_rounded(temperature), encoded[index].tobytes()) in done for index in chosen):
                continue
            rollouts = roll_out(
                target,
                [encoded[index] for index in chosen],
                temperatures=[float(temperature)] * len(chosen),
                key=jax.random.fold_in(jax.random.key(config.seed), number),
                max_new_tokens=config.rollout.max_new_tokens,
                stop_ids=tokenizer.stop_ids,
                top=config.rollout.top,
                keep_hidden=config.rollout.keep_hidden_states or config.draft.reads_hidden,
            )
            corpus.write(number, rollouts, [prompts[index].source for index in chosen])
            number += 1
    return corpus


def evaluate(
    draft: Draft, target: Model, held_out: Corpus, draft_len: int, temperatures: Sequence[float] = ()
) -> tuple[dict[str, Agreement], dict[str, dict[float, float]]]:
    """Measures a draft on the answers to held-out prompts.

    Returns:
        Its agreement with the greedy answers by domain, and its acceptance on the answers sampled at `temperatures` by
        domain and temperature.
    """
    greedy = held_out_groups(held_out, is_sampled=False)

    def readable(rows: list[Rollout]) -> list[Rollout]:
        return with_hidden(rows, target, draft.head.hidden_layers) if isinstance(draft, Eagle3Model) else rows

    agreements = {name: measure_agreement(draft, readable(rows), draft_len) for (name, _), rows in greedy}
    acceptances: dict[str, dict[float, float]] = {}
    for (name, temperature), rows in held_out_groups(held_out, is_sampled=True):
        if temperature in {_rounded(wanted) for wanted in temperatures}:
            acceptances.setdefault(name, {})[temperature] = sampled_acceptance(draft, target, readable(rows))
    return agreements, acceptances


def held_out_groups(held_out: Corpus, *, is_sampled: bool) -> list[tuple[tuple[str, float], list[Rollout]]]:
    """Returns the greedy or the sampled answers by domain and temperature, in ascending order."""
    groups: dict[tuple[str, float], list[Rollout]] = {}
    for rollout, domain in held_out.read():
        if (rollout.temperature > 0) == is_sampled:
            groups.setdefault((domain, _rounded(rollout.temperature)), []).append(rollout)
    return sorted(groups.items())


def _rounded(temperature: float) -> float:
    """Undoes the rounding of a shard, which stores temperatures in float32."""
    return round(float(temperature), 6)
