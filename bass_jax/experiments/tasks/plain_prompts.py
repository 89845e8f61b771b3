"""Any prompts: speed, acceptance and agreement of the texts, without a score."""

import json
import zlib

from bass_jax.experiments.tasks.base import Problem, Row, Task, register_task


def read(row: Row) -> Problem:
    """Rows with a ``"prompt"``, and perhaps an ``"id"`` and a ``"category"``."""
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise TypeError(f"prompt: expected text, not {json.dumps(prompt)[:60]}")
    id = str(row.get("id", f"{zlib.crc32(prompt.encode()):08x}"))
    return Problem(id=id, question=prompt, text=prompt, category=str(row.get("category") or ""))


PROMPTS = register_task(Task(name="prompts", data="prompts.jsonl", read=read))


def read_random(row: Row) -> Problem:
    """Rows of the source ``"random:rows:tokens"``."""
    return Problem(id=row["id"], question="", text="", num_random_tokens=row["num_tokens"])


RANDOM_TOKENS = register_task(Task(name="random_tokens", data="random:64:128", read=read_random))
"""Prompts for random weights: latency and memory do not depend on what is asked."""
