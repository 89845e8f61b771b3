"""The target's greedy outputs on held-out prompts, and what a draft is worth on each domain."""

from pathlib import Path

import jax

from bass_jax.checkpoint import Tokenizer
from bass_jax.models import Model
from bass_jax.training.agreement import Agreement, measure_agreement
from bass_jax.training.config import DistillConfig
from bass_jax.training.corpus import Corpus
from bass_jax.training.prompts import held_out_prompts
from bass_jax.training.rollout import Rollout, roll_out, waves

_BATCH = 32


def write_held_out(config: DistillConfig, model: Model, tokenizer: Tokenizer) -> Corpus:
    """Lets the target answer the held-out prompts at temperature 0, resumable between batches.

    Args:
        config: names the prompts; ``output_dir`` receives ``held_out/``.
        model: the target, in the dtype that it will be used in.
        tokenizer: its tokenizer.

    Raises:
        ValueError: if the answers there are to other prompts.
    """
    prompts = held_out_prompts(config.prompts)
    description = {
        "target": config.target,
        "max_new_tokens": config.rollout.max_new_tokens,
        "prompts": [list(prompt) for prompt in prompts],
    }
    corpus = Corpus(Path(config.output_dir) / "held_out", description)
    encoded = [tokenizer.encode_chat(prompt.text) for prompt in prompts]
    done = set(corpus.shards())
    for wave, chosen in enumerate(waves([len(ids) for ids in encoded], _BATCH, len(encoded))):
        if wave in done:
            continue
        rollouts = roll_out(
            model,
            [encoded[index] for index in chosen],
            temperatures=[0.0] * len(chosen),
            key=jax.random.key(0),
            max_new_tokens=config.rollout.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            top=config.rollout.top,
            keep_features=config.draft.reads_hidden,
        )
        corpus.write(wave, rollouts, [prompts[index].source for index in chosen])
    return corpus


def evaluate(draft: Model, held_out: Corpus, draft_len: int) -> dict[str, Agreement]:
    """Measures a draft on every held-out domain, in the domains' order of appearance."""
    domains: dict[str, list[Rollout]] = {}
    for rollout, source in held_out.read():
        domains.setdefault(source, []).append(rollout)
    return {name: measure_agreement(draft, rows, draft_len) for name, rows in sorted(domains.items())}
