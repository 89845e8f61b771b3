"""Prompts of any kind, and prompts of random tokens, without a score."""

import json
import zlib

from bass_jax.experiments.tasks.base import Problem, Row, Task, register_task


def read(row: Row) -> Problem:
    """Reads a row with a ``"prompt"``, and optionally an ``"id"`` and a ``"category"``."""
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise TypeError(f"prompt: expected text, not {json.dumps(prompt)[:60]}")
    id = str(row.get("id", f"{zlib.crc32(prompt.encode()):08x}"))
    return Problem(id=id, question=prompt, text=prompt, category=str(row.get("category") or ""))


PROMPTS = register_task(Task(name="prompts", data="prompts.jsonl", read=read))


def read_random(row: Row) -> Problem:
    """Reads a row of the source ``"random:rows:tokens"``."""
    return Problem(id=row["id"], question="", text="", num_random_tokens=row["num_tokens"])


RANDOM_TOKENS = register_task(Task(name="random_tokens", data="random:64:128", read=read_random))
"""Prompts for random weights, for which latency and memory do not depend on the tokens."""
