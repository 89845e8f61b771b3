"""Experiments from a configuration: tasks, runs, scores, reports."""

from bass_jax.experiments.cage import CageLimits, run_program
from bass_jax.experiments.config import ExperimentConfig, load_experiment, parse_experiment
from bass_jax.experiments.directory import RunRecords, read_run
from bass_jax.experiments.results import RunResult, analyse
from bass_jax.experiments.runner import run_experiment
from bass_jax.experiments.scoring import score_run
from bass_jax.experiments.tasks import Problem, Task, find_task, register_task, registered_tasks

__all__ = [
    "CageLimits",
    "ExperimentConfig",
    "Problem",
    "RunRecords",
    "RunResult",
    "Task",
    "analyse",
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
