"""Writes a corpus: prompts through the target, wave by wave, resumable at any moment."""

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
from bass_jax.training.prompts import Prompt, build_prompts
from bass_jax.training.questions import questions_directory, write_questions
from bass_jax.training.rollout import roll_out, waves

_WINDOW = 4


class WriteProgress(NamedTuple):
    """Where the writing of a corpus stands.

    Attributes:
        num_tokens: response tokens on disk, of this worker's share.
        wanted: response tokens that the configuration asks of this worker.
        tokens_per_second: of this run, prompts not counted.
    """

    num_tokens: int
    wanted: int
    tokens_per_second: float


def target_path(target: str) -> Path:
    """Finds the target's checkpoint; ``"package:module"`` is the one ``.gguf`` file inside a package.

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
    model: Model,
    tokenizer: Tokenizer,
    *,
    worker: tuple[int, int] = (0, 1),
    progress: Callable[[WriteProgress], None] | None = None,
) -> Corpus:
    """Lets the target answer the recipe's prompts until the corpus has its tokens.

    A shard is one wave of prompts and does not depend on the others, so that a second call goes on where
    the first was interrupted, and several processes can write one corpus.

    Args:
        config: the recipe and the rollout.
        model: the target.
        tokenizer: its tokenizer, with a chat template.
        worker: ``(index, count)``: this process writes every `count`-th shard.
        progress: told after every shard.

    Raises:
        ValueError: if the corpus was begun from another recipe, or no prompt is short enough.
    """
    corpus = open_corpus(config, is_new=True)
    done = set(corpus.shards())
    num_tokens = sum(len(rollout.response) for rollout, _ in corpus.read()) // worker[1]
    wanted = config.rollout.num_tokens // worker[1]
    if num_tokens >= wanted:
        return corpus
    write_questions(config, model, tokenizer)
    prompts = [
        (prompt, ids)
        for prompt in build_prompts(config.prompts, config.seed, questions_directory(config)).prompts
        if len(ids := tokenizer.encode_chat(prompt.text)) <= config.prompts.max_prompt_tokens
    ]
    if not prompts:
        raise ValueError(f"max_prompt_tokens={config.prompts.max_prompt_tokens}: no prompt is short enough")
    start = time.perf_counter()
    written = 0
    plan = list(waves([len(ids) for _, ids in prompts], config.rollout.batch, _WINDOW))
    for wave in range(worker[0], len(plan), worker[1]):
        if wave in done:
            continue
        chosen: list[tuple[Prompt, np.ndarray]] = [prompts[index] for index in plan[wave]]
        rollouts = roll_out(
            model,
            [ids for _, ids in chosen],
            temperatures=_temperatures(config, plan[wave]),
            key=jax.random.fold_in(jax.random.key(config.seed), wave),
            max_new_tokens=config.rollout.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            top=config.rollout.top,
            keep_hidden_states=config.rollout.keep_hidden_states,
        )
        added = corpus.write(wave, rollouts, [prompt.source for prompt, _ in chosen])
        num_tokens, written = num_tokens + added, written + added
        if progress is not None:
            speed = written / (time.perf_counter() - start)
            progress(WriteProgress(num_tokens, wanted, speed))
        if num_tokens >= wanted:
            break
    return corpus


def open_corpus(config: DistillConfig, *, is_new: bool = False) -> Corpus:
    """Opens the configuration's corpus; `is_new` makes it when it is absent.

    Raises:
        ValueError: if it was begun from another recipe.
    """
    rollout = dataclasses.asdict(config.rollout)
    # More of the same corpus may be asked for, and hidden states are kept beside it.
    del rollout["num_tokens"], rollout["keep_features"]
    recipe = dataclasses.asdict(config.prompts)
    del recipe["data_dir"], recipe["held_out"]
    description = {"target": config.target, "seed": config.seed, "prompts": recipe, "rollout": rollout}
    return Corpus(config.corpus_root / "corpus", description if is_new else None)


def _temperatures(config: DistillConfig, rows: list[int]) -> list[float]:
    """Draws each prompt's temperature, by its place in the recipe."""
    values = list(config.rollout.temperatures)
    shares = np.array([config.rollout.temperatures[value] for value in values], float)
    ends = np.cumsum(shares / shares.sum())
    draws = [np.random.default_rng((config.seed, row)).random() for row in rows]
    return [values[min(int(np.searchsorted(ends, draw, side="right")), len(values) - 1)] for draw in draws]
