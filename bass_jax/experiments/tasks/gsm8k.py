"""GSM8K: school mathematics. The last number of an answer must be the right one."""

import re
import zlib

from bass_jax.experiments.tasks.base import Problem, Row, Task, register_task

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """Returns the last number in `text`, which may have commas between thousands; None without a number."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def read(row: Row) -> Problem:
    """Returns the question unchanged."""
    question = row["question"]
    return Problem(
        id=f"gsm8k/{zlib.crc32(question.encode()):08x}",
        question=question,
        text=f"Question: {question}\nAnswer:",
        row={"answer": last_number(row["answer"].rpartition("####")[2])},
    )


def score(problem: Problem, answer: str) -> dict[str, float]:
    """Returns 1 if the last number equals that of the reference."""
    found = last_number(answer)
    return {"exact": float(found is not None and abs(found - problem.row["answer"]) < 1e-6)}


GSM8K = register_task(
    Task(
        name="gsm8k",
        data="datasets:openai/gsm8k:main:test",
        read=read,
        score=score,
        measure="exact",
        text_stop_strings=("\nQuestion:",),
    )
)
"""Source: Cobbe et al. 2021 (arXiv 2110.14168)."""
