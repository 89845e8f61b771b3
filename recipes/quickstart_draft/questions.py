"""User messages that the target generates, to be answered afterwards."""

import json
from pathlib import Path

import jax
import numpy as np

from bass_jax.checkpoint import Tokenizer
from bass_jax.models import Model
from bass_jax.runtime.files import read_jsonl, write_atomically
from bass_jax.training.rollout import roll_out
from bass_jax.typing import Array, Key
from recipes.quickstart_draft.sources import SelfAskedSource

_MIN_WORDS = 3


def write_questions(
    path: Path, source: SelfAskedSource, batch: int, key: Key[Array, ""], target: Model, tokenizer: Tokenizer
) -> None:
    """Generates the messages of a source, batch by batch; after an interruption it continues with the next batch.

    Args:
        path: a JSON Lines file with the fields ``prompt`` and ``batch``, the number of its batch.
        source: how many, and how they are sampled.
        batch: messages that are generated together.
        key: of sampling.
        target: generates the messages.
        tokenizer: with a chat template.

    Raises:
        ValueError: if the chat template has nothing before the user's message.
    """
    rows = [row for _, row in read_jsonl(path)] if path.exists() else []
    seen = {row["prompt"] for row in rows}
    num_done = max((row["batch"] for row in rows), default=-1) + 1
    start = tokenizer.encode_question_start()
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(num_done, -(-source.num // batch)):
        count = min(batch, source.num - number * batch)
        rollouts = roll_out(
            target,
            [start] * count,
            temperatures=[source.temperature] * count,
            key=jax.random.fold_in(key, number),
            max_new_tokens=source.max_new_tokens,
            stop_ids=tokenizer.stop_ids,
            top=source.top,
        )
        for rollout in rollouts:
            text = tokenizer.decode(rollout.response).strip()
            is_finished = np.isin(rollout.response[-1], tokenizer.stop_ids)
            if is_finished and len(text.split()) >= _MIN_WORDS and text not in seen:
                seen.add(text)
                rows.append({"prompt": text, "batch": number})
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
