"""Writes a corpus: the target answers the prompts, one batch per shard."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from bass_jax.checkpoint import Tokenizer, load_model, load_tokenizer
from bass_jax.models import Model
from bass_jax.training.corpus import Corpus
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.prompts import GeneratedPromptSource, PromptSource
from bass_jax.training.rollout import batches_by_length, roll_out

_WINDOW = 4


class WriteProgress(NamedTuple):
    """The progress of writing a worker's share of a corpus."""

    num_tokens: int  # response tokens on disk
    num_wanted: int  # response tokens that the configuration asks for
    tokens_per_second: float  # of this run


def target_path(target: str) -> Path:
    """Returns the path of the target's checkpoint; ``"package:module"`` is the only ``.gguf`` file inside a package.

    Raises:
        ValueError: if the package is not installed or does not hold exactly one such file.
    """
    if not target.startswith("package:"):
        return Path(target)
    name = target.removeprefix("package:")
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ValueError(f"target: package {name!r} is not installed")
    files = [file for root in spec.submodule_search_locations or () for file in Path(root).glob("*.gguf")]
    if len(files) != 1:
        raise ValueError(f"target: package {name!r} has {len(files)} .gguf files; expected one")
    return files[0]


def load_target(config: DistillConfig, dtype: str) -> tuple[Model, Tokenizer]:
    """Loads the target and its tokenizer."""
    path = target_path(config.target)
    return load_model(path, dtype=dtype), load_tokenizer(path)


def write_corpus(
    config: DistillConfig,
    source: PromptSource,
    target: Model,
    tokenizer: Tokenizer,
    *,
    worker: tuple[int, int] = (0, 1),
    progress: Callable[[WriteProgress], None] | None = None,
) -> Corpus:
    """Lets the target answer prompts until the corpus has the tokens that the configuration asks for.

    A shard holds the answers to one batch of prompts and does not depend on other shards. A second call therefore
    continues an interrupted one, and several processes can write one corpus.

    Args:
        config: of the distillation.
        source: the prompts.
        target: the target.
        tokenizer: with a chat template.
        worker: ``(index, count)``: this process writes every `count`-th shard.
        progress: called after every shard.

    Raises:
        ValueError: if the corpus was begun with other options, or no prompt is short enough.
    """
    rollout = dataclasses.asdict(config.rollout)
    # These two can change while a corpus grows.
    del rollout["num_tokens"], rollout["keep_hidden_states"]
    prompts_description = {**source.description, "max_prompt_tokens": config.prompts.max_prompt_tokens}
    description = {"target": config.target, "seed": config.seed, "prompts": prompts_description, "rollout": rollout}
    corpus = Corpus(config.corpus_root / "corpus", description)
    done = set(corpus.shards())
    num_tokens = sum(len(row.response) for row, _ in corpus.read()) // worker[1]
    num_wanted = config.rollout.num_tokens // worker[1]
    if num_tokens >= num_wanted:
        return corpus
    if isinstance(source, GeneratedPromptSource):
        source.write_prompts(target, tokenizer)
    encoded = [(tokenizer.encode_chat(prompt.text), prompt.source) for prompt in source.prompts()]
    prompts = [(ids, name) for ids, name in encoded if len(ids) <= config.prompts.max_prompt_tokens]
    if not prompts:
        raise ValueError(f"max_prompt_tokens={config.prompts.max_prompt_tokens}: no prompt is short enough")
    start, num_written = time.perf_counter(), 0
    plan = list(batches_by_length([len(ids) for ids, _ in prompts], config.rollout.batch, _WINDOW))
    for number in range(worker[0], len(plan), worker[1]):
        if number in done:
            continue
        rollouts = roll_out(
            target,
            [prompts[index][0] for index in plan[number]],
            temperatures=[
                config.rollout.draw_temperature(np.random.default_rng((config.seed, index)).random())
                for index in plan[number]
            ],
            key=jax.random.fold_in(jax.random.key(config.seed), number),
            max_new_tokens=config.rollout.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            top=config.rollout.top,
            keep_hidden=config.rollout.keep_hidden_states,
        )
        num_added = corpus.write(number, rollouts, [prompts[index][1] for index in plan[number]])
        num_tokens, num_written = num_tokens + num_added, num_written + num_added
        if progress is not None:
            progress(WriteProgress(num_tokens, num_wanted, num_written / (time.perf_counter() - start)))
        if num_tokens >= num_wanted:
            break
    return corpus
