"""A task to copy: does the answer hold the expected word?

Name yours in a config as ``task: {name: "my_module:MY_TASK", data: my_rows.jsonl}``, or call `register_task` on it; the
protocol tests run over every registered task, and over this one.
"""

from bass_jax.experiments.tasks.base import Problem, Row, Task


def read(row: Row) -> Problem:
    """Rows have a question and a word: ``{"question": …, "word": …}``."""
    return Problem(
        id=row["question"],
        question=row["question"],
        text=f"Question: {row['question']}\nAnswer:",
        row=row,
    )


def score(problem: Problem, answer: str) -> dict[str, float]:
    """1 if the word is there, else 0."""
    return {"found": float(problem.row["word"].lower() in answer.lower())}


HOLDS_WORD = Task(
    name="holds_word", data="my_rows.jsonl", read=read, score=score, measure="found", text_stop_strings=("\n",)
)
