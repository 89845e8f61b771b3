"""A task to copy: it scores whether the answer contains the expected word.

Name your task in a configuration as ``task: {name: "my_module:MY_TASK", data: my_rows.jsonl}``, or register it with
`register_task`. The tests of the protocol run over every registered task and over this one.
"""

from bass_jax.experiments.tasks.base import Problem, Row, Task


def read(row: Row) -> Problem:
    """Reads a row with a question and a word: ``{"question": …, "word": …}``."""
    return Problem(
        id=row["question"],
        question=row["question"],
        text=f"Question: {row['question']}\nAnswer:",
        row=row,
    )


def score(problem: Problem, answer: str) -> dict[str, float]:
    """Returns 1 if the answer contains the word, else 0."""
    return {"found": float(problem.row["word"].lower() in answer.lower())}


CONTAINS_WORD = Task(
    name="contains_word", data="my_rows.jsonl", read=read, score=score, measure="found", text_stop_strings=("\n",)
)
