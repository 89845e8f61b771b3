"""Spec-Bench: questions of six categories, to compare speeds without a score."""

from bass_jax.experiments.tasks.base import Problem, Row, Task, register_task

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def read(row: Row) -> Problem:
    """Returns the first turn; the categories of MT-Bench form one, ``"conversation"``."""
    category = row["category"]
    return Problem(
        id=str(row["question_id"]),
        question=row["turns"][0],
        text=row["turns"][0],
        category="conversation" if category in _MT_BENCH else category,
    )


SPEC_BENCH = register_task(Task(name="spec_bench", data="spec_bench_question.jsonl", read=read))
"""Source: Xia et al. 2024 (arXiv 2401.07851)."""
