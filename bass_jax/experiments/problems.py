"""The problems of a task, as token ids of a pair."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bass_jax.decoding.pair import Pair
from bass_jax.experiments.data_sources import read_data
from bass_jax.experiments.experiment_config import TaskConfig
from bass_jax.experiments.tasks import Problem, Task, find_task, read_problem
from bass_jax.runtime.names import expected_one_of


def load_problems(config: TaskConfig) -> tuple[Task, list[Problem]]:
    """Reads the data of a task and selects the problems that the configuration asks for.

    Raises:
        ValueError: if the data cannot be read, two problems share an id, or a category does not exist.
    """
    task = find_task(config.name)
    source = config.data or task.data
    problems = [read_problem(task, row, f"{source}: row {index}") for index, row in enumerate(read_data(source))]
    for most_common, count in Counter(problem.id for problem in problems).most_common(1):
        if count > 1:
            raise ValueError(f"{source}: the id {most_common!r} occurs {count} times")
    if config.categories is not None:
        known = {problem.category for problem in problems}
        if unknown := [name for name in config.categories if name not in known]:
            raise ValueError(f"task.categories: {unknown[0]!r}: {expected_one_of(unknown[0], sorted(known))}")
        problems = [problem for problem in problems if problem.category in config.categories]
    if config.per_category is not None:
        num_before = Counter()
        kept = []
        for problem in problems:
            if num_before[problem.category] < config.per_category:
                kept.append(problem)
            num_before[problem.category] += 1
        problems = kept
    return task, problems[: config.limit]


def encode_problems(
    task: Task, problems: Sequence[Problem], pair: Pair, config: TaskConfig
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Returns the token ids of each problem (``[n]`` int32), and the strings that end an answer.

    Raises:
        ValueError: if the pair has no tokenizer for texts, or its tokenizer has no chat template for a chat.
    """
    tokenizer: Any = pair.tokenizer
    if tokenizer is None:
        return [_random_tokens(index, one, pair) for index, one in enumerate(problems)], ()
    if tokenizer.has_chat_template if config.chat is None else config.chat:
        prompts = [tokenizer.encode_chat(one.question, answer_start=one.answer_start) for one in problems]
        return prompts, task.stop_strings
    return [tokenizer.encode(one.text) for one in problems], task.text_stop_strings


def _random_tokens(index: int, problem: Problem, pair: Pair) -> np.ndarray:
    if problem.num_random_tokens is None:
        raise ValueError("task: random weights have no tokenizer: expected task: {name: random_tokens}")
    random = np.random.default_rng(index)
    return random.integers(0, pair.target.vocab_size, problem.num_random_tokens).astype(np.int32)
