"""MBPP: write a Python function for a description. Assertions check it."""

from bass_jax.experiments.tasks.base import Problem, Row, Task, register_task
from bass_jax.experiments.tasks.code import code_of


def read(row: Row) -> Problem:
    """Returns the description with the first assertion, because the description does not name the function."""
    text, tests = row["text"], list(row["test_list"])
    return Problem(
        id=f"MBPP/{row['task_id']}",
        question=f"{text} Your code should pass this test: {tests[0]}",
        text=f'"""\n{text}\n{tests[0]}\n"""\n',
        answer_start="```python\n",
        row={"tests": tests, "setup": row.get("test_setup_code") or ""},
    )


def program(problem: Problem, answer: str) -> str:
    """Returns the code of the answer and the assertions."""
    return "\n".join([problem.row["setup"], code_of(answer), *problem.row["tests"], ""])


MBPP = register_task(
    Task(
        name="mbpp",
        data="datasets:google-research-datasets/mbpp:test",
        read=read,
        program=program,
        stop_strings=("\n```",),
        text_stop_strings=("\nassert", '\n"""', "\nprint(", "\nif __name__"),
    )
)
"""Source: Austin et al. 2021 (arXiv 2108.07732)."""
