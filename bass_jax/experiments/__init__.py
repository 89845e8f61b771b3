"""Experiments from a YAML file: tasks, runs, scores and reports.

Imports every package but `bass_jax.cli`. Start with `experiment_config.py`, then `runner.py`.
"""

from bass_jax.experiments.experiment_config import ExperimentConfig, load_experiment, parse_experiment
from bass_jax.experiments.results import RunResult, analyze
from bass_jax.experiments.run_directory import RunRecords, read_run
from bass_jax.experiments.runner import run_experiment
from bass_jax.experiments.sandbox import SandboxLimits, run_program
from bass_jax.experiments.scoring import score_run
from bass_jax.experiments.tasks import Problem, Task, find_task, register_task, registered_tasks

__all__ = [
    "ExperimentConfig",
    "Problem",
    "RunRecords",
    "RunResult",
    "SandboxLimits",
    "Task",
    "analyze",
    "find_task",
    "load_experiment",
    "parse_experiment",
    "read_run",
    "register_task",
    "registered_tasks",
    "run_experiment",
    "run_program",
    "score_run",
]
