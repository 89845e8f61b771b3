"""The task's protocol: what is asked, and what an answer is worth."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bass_jax.runtime.imports import import_attribute

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing to ask.

    Attributes:
        id: unique within the data set.
        question: what a user says to a chat model.
        text: what a model without a chat template continues.
        answer_start: what a chat model's answer is made to begin with; not part of the answer's text.
        category: of a data set that has some; results are also given per category.
        row: the data that `Task.program` and `Task.score` need.
        num_random_tokens: of a prompt of random tokens in place of any text, for pairs without a tokenizer.
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
    """A data set and its measure, as three small functions.

    Attributes:
        name: in configurations.
        data: default source; see `bass_jax.experiments.data_sources.read_rows`.
        read: one row of data to a problem.
        program: of tasks whose answers are code: Python source that raises nothing if the answer is right. It is run
            only where a user allows that. ``(problem, answer) -> source``.
        score: of other tasks: measures of the answer, each 0 to 1, larger is better. ``(problem, answer) -> {name:
            value}``.
        measure: the measure that tables lead with; a program's is ``"passed"``.
        stop_strings: of a chat; an answer ends before one.
        text_stop_strings: likewise where a text is continued.
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
            raise ValueError(f"task {self.name!r}: measure={self.measure!r}: a program's is 'passed'")

    @property
    def is_scored(self) -> bool:
        """Whether answers can be right or wrong at all."""
        return self.program is not None or self.score is not None


_REGISTRY: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Makes `task` known by its name.

    Raises:
        ValueError: if the name is taken.
    """
    if task.name in _REGISTRY:
        raise ValueError(f"task {task.name!r}: a task of this name is registered already")
    _REGISTRY[task.name] = task
    return task


def registered_tasks() -> dict[str, Task]:
    """Returns the tasks by name."""
    return dict(_REGISTRY)


def find_task(name: str) -> Task:
    """Returns a registered task, or the one that ``"module:name"`` stands for.

    Raises:
        ValueError: if there is none.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    if ":" not in name:
        raise ValueError(f"task={name!r}: expected one of {sorted(_REGISTRY)} or 'module:name'")
    task = import_attribute(name, "task")
    if not isinstance(task, Task):
        raise ValueError(f"task={name!r}: expected a bass_jax.experiments.Task")
    return task


def read_problem(task: Task, row: Row, place: str) -> Problem:
    """Reads a row, and says which one it was if it lacks something.

    Raises:
        ValueError: naming `place` and the missing key.
    """
    try:
        return task.read(row)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{place}: not a row of the task {task.name!r}: {type(error).__name__} {error}") from None
