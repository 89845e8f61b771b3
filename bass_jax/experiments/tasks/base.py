"""The protocol of tasks: problems, and the scores of answers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bass_jax.runtime.imports import import_attribute
from bass_jax.runtime.names import expected_one_of

type Row = Mapping[str, Any]
"""One row of a data set."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question of a task.

    Attributes:
        id: unique in the data set.
        question: the user's message to a chat model.
        text: the text that a model without a chat template continues.
        answer_start: beginning of a chat model's answer that is given to it; not part of the answer's text.
        category: for data with categories; results are also reported per category.
        row: data for `Task.program` and `Task.score`.
        num_random_tokens: length of a prompt of random tokens instead of a text, for pairs without a tokenizer.
    """

    id: str
    question: str
    text: str
    answer_start: str = ""
    category: str = ""
    row: Row = dataclasses.field(default_factory=dict)
    num_random_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set and its measure, as up to three functions.

    Attributes:
        name: in configurations.
        data: default source; see `bass_jax.experiments.data_sources.read_data`.
        read: converts a row of data to a problem.
        program: for answers that are code: ``(problem, answer) -> source`` of a Python program that raises nothing if
            the answer is right. It runs only if a user allows it.
        score: for other answers: ``(problem, answer) -> {name: value}``, values 0 to 1, larger is better.
        measure: the main measure in tables; ``"passed"`` for programs.
        stop_strings: strings that end an answer in a chat.
        text_stop_strings: strings that end an answer to a text.
    """

    name: str
    data: str
    read: Callable[[Row], Problem]
    program: Callable[[Problem, str], str] | None = None
    score: Callable[[Problem, str], Mapping[str, float]] | None = None
    measure: str = "passed"
    stop_strings: tuple[str, ...] = ()
    text_stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if self.program is not None and self.score is not None:
            raise ValueError(f"task {self.name!r}: expected a program or a score, not both")
        if self.program is not None and self.measure != "passed":
            raise ValueError(f"task {self.name!r}: measure={self.measure!r}: expected 'passed' with a program")

    @property
    def is_scored(self) -> bool:
        """Whether answers get a score."""
        return self.program is not None or self.score is not None


_REGISTRY: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Registers `task` under its name and returns it.

    Raises:
        ValueError: if the name is registered already.
    """
    if task.name in _REGISTRY:
        raise ValueError(f"task {task.name!r}: a task of this name is registered already")
    _REGISTRY[task.name] = task
    return task


def registered_tasks() -> dict[str, Task]:
    """Returns the tasks by name."""
    return dict(_REGISTRY)


def find_task(name: str) -> Task:
    """Returns a registered task, or the task that ``"module:name"`` refers to.

    Raises:
        ValueError: if it does not exist.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    if ":" not in name:
        raise ValueError(f"task={name!r}: {expected_one_of(name, sorted(_REGISTRY), "'module:name'")}")
    task = import_attribute(name, "task")
    if not isinstance(task, Task):
        raise ValueError(f"task={name!r}: expected a bass_jax.experiments.Task")
    return task


def read_problem(task: Task, row: Row, place: str) -> Problem:
    """Converts a row to a problem.

    Raises:
        ValueError: if the row lacks a key; the message begins with `place`.
    """
    try:
        return task.read(row)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{place}: not a row of the task {task.name!r}: {type(error).__name__} {error}") from None
