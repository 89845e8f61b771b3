"""Tasks: their problems, and how an answer is scored.

Imported by `bass_jax.experiments`. Start with `base.py`; `template.py` is the file to copy for a task of your own.
"""

# Importing these modules registers their tasks.
from bass_jax.experiments.tasks import gsm8k, humaneval, mbpp, plain_prompts, spec_bench, summarization  # noqa: F401
from bass_jax.experiments.tasks.base import Problem, Task, find_task, read_problem, register_task, registered_tasks

__all__ = ["Problem", "Task", "find_task", "read_problem", "register_task", "registered_tasks"]
