"""A grid over a configuration: one run directory per point, here or on a Ray cluster."""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bass_jax.experiments.experiment_config import ExperimentConfig, load_experiment
from bass_jax.experiments.runner import run_experiment
from bass_jax.runtime.jit_cache import JIT_CACHE


class Point(NamedTuple):
    """One point of a grid."""

    overrides: dict[str, Any]  # dotted path to value
    config: ExperimentConfig  # its output_dir is its own, inside the sweep's


def make_grid(
    path: str | Path, grid: Mapping[str, Sequence[Any]], overrides: Mapping[str, Any] | None = None
) -> list[Point]:
    """Returns all points, the last key changing fastest.

    Args:
        path: of the configuration.
        grid: dotted path to the values that it shall take.
        overrides: for all points alike.

    Raises:
        ValueError: if a point is no valid configuration, or a key of the grid has no values.
    """
    for name, values in grid.items():
        if not values:
            raise ValueError(f"grid {name}: expected values")
    points = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        config = load_experiment(path, {**(overrides or {}), **chosen})
        directory = str(Path(config.output_dir) / point_name(chosen))
        title = ", ".join(f"{name} = {value}" for name, value in chosen.items())
        changed = {"output_dir": directory, "title": title}
        points.append(Point(chosen, load_experiment(path, {**(overrides or {}), **chosen, **changed})))
    return points


def point_name(overrides: Mapping[str, Any]) -> str:
    """Returns a folder's name for a point: its values in words, and a hash where they are long."""
    words = [f"{name.rpartition('.')[2]}={_word(value)}" for name, value in overrides.items()]
    name = "".join(letter if letter.isalnum() or letter in "=.,-_" else "_" for letter in ",".join(words))
    if len(name) <= 80 and len({path.rpartition(".")[2] for path in overrides}) == len(overrides):
        return name
    return f"{name[:60]}-{hashlib.sha256(json.dumps(dict(overrides), sort_keys=True).encode()).hexdigest()[:12]}"


def _word(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def run_sweep(
    points: Sequence[Point],
    *,
    command: Sequence[str] | None = None,
    on_point: Callable[[int, Point], None] = lambda index, point: None,
    **options: Any,
) -> list[Path]:
    """Runs the points one after another; those that are finished cost nothing.

    Args:
        points: of `make_grid`.
        command: for the record; see `run_experiment`.
        on_point: called before each.
        options: of `run_experiment`.
    """
    directories = []
    for index, point in enumerate(points):
        on_point(index, point)
        directories.append(run_experiment(point.config, command=command, **options))
        # Models and executables of the next point need the room.
        JIT_CACHE.clear()
    return directories


def run_sweep_with_ray(
    points: Sequence[Point],
    *,
    command: Sequence[str] | None = None,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    on_point: Callable[[int, Point], None] = lambda index, point: None,
) -> list[Path]:
    """Runs the points as Ray tasks, each in a process with the devices that Ray gives it.

    Run directories must lie where all machines see them. Ray keeps the queue, and starts again what a lost machine was
    working on; a point resumes like any run.

    Args:
        points: of `make_grid`.
        command: for the record.
        address: of a cluster; default this machine.
        cpus: cores per point.
        gpus: devices per point.
        on_point: called as points end.

    Raises:
        ValueError: if Ray is not installed.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("a sweep on several devices or machines needs Ray: pip install 'bass-jax[sweep]'") from None
    with ray.init(address=address, include_dashboard=False, configure_logging=False):
        # A fresh process per point: a device's memory is given back only with its process.
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1, max_retries=2)(_run_point)
        running = {task.remote(point.config, list(command or [])): index for index, point in enumerate(points)}
        done: dict[int, Path] = {}
        while running:
            (finished,), _ = ray.wait(list(running), num_returns=1)
            index = running.pop(finished)
            done[index] = Path(ray.get(finished))
            on_point(index, points[index])
    return [done[index] for index in range(len(points))]


def _run_point(config: ExperimentConfig, command: list[str]) -> str:
    return str(run_experiment(config, command=command or None))
