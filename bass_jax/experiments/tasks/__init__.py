"""What is asked, and what an answer is worth; `template` is the file to copy."""

# Each of these registers its tasks.
from bass_jax.experiments.tasks import gsm8k, humaneval, mbpp, prompts, spec_bench, summarisation
from bass_jax.experiments.tasks.base import (
    Problem,
    Task,
    find_task,
    read_problem,
    register_task,
    registered_tasks,
)

__all__ = [
    "Problem",
    "Task",
    "find_task",
    "gsm8k",
    "humaneval",
    "mbpp",
    "prompts",
    "read_problem",
    "register_task",
    "registered_tasks",
    "spec_bench",
    "summarisation",
]
