"""Messages that the target writes in the user's place, to answer them afterwards."""

import json
from pathlib import Path

import jax
import numpy as np

from bass_jax.checkpoint import Tokenizer
from bass_jax.models import Model
from bass_jax.training.corpus import write_whole
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.prompts import question_file, read_rows
from bass_jax.training.recipe import SelfAskedSource
from bass_jax.training.rollout import roll_out

_MIN_WORDS = 3


def questions_directory(config: DistillConfig) -> Path:
    """Where a configuration's self-asked messages lie."""
    return config.corpus_root / "questions"


def write_questions(config: DistillConfig, model: Model, tokenizer: Tokenizer) -> None:
    """Lets the target write the messages of every self-asked source, resumable between batches.

    Raises:
        ValueError: if the chat template has nothing before the user's message.
    """
    for index, source in enumerate(config.prompts.sources):
        if isinstance(source, SelfAskedSource):
            path = question_file(questions_directory(config), source.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            key = jax.random.fold_in(jax.random.key(config.seed), index)
            _write(path, source, config.rollout.batch, key, model, tokenizer)


def _write(path: Path, source: SelfAskedSource, batch: int, key, model: Model, tokenizer: Tokenizer) -> None:
    rows = list(read_rows(path)) if path.exists() else []
    said = {row["prompt"] for row in rows}
    done = max((row["wave"] for row in rows), default=-1) + 1
    start = tokenizer.encode_question_start()
    for wave in range(done, -(-source.num // batch)):
        count = min(batch, source.num - wave * batch)
        rollouts = roll_out(
            model, [start] * count, temperatures=[source.temperature] * count, key=jax.random.fold_in(key, wave),
            max_new_tokens=source.max_new_tokens, stop_ids=tokenizer.stop_ids, top=source.top,
        )  # fmt: skip
        for rollout in rollouts:
            text = tokenizer.decode(rollout.response).strip()
            is_whole = np.isin(rollout.response[-1], tokenizer.stop_ids)
            if is_whole and len(text.split()) >= _MIN_WORDS and text not in said:
                said.add(text)
                rows.append({"prompt": text, "wave": wave})
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
