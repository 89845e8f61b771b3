"""Runs an experiment at every point of a grid, one run directory per point, here or on a Ray cluster."""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bass_jax.experiments.experiment_config import ExperimentConfig, load_experiment
from bass_jax.experiments.runner import run_experiment
from bass_jax.runtime.jit_cache import JIT_CACHE


class GridPoint(NamedTuple):
    """One point of a grid."""

    overrides: dict[str, Any]  # dotted path → value
    config: ExperimentConfig  # with an output directory of its own inside the sweep's


def make_grid(
    path: str | Path, grid: Mapping[str, Sequence[Any]], overrides: Mapping[str, Any] | None = None
) -> list[GridPoint]:
    """Returns the points of a grid (dotted path → values) over the configuration `path`; the last key changes fastest.

    Raises:
        ValueError: if a point is not a valid configuration, or a key of the grid has no values.
    """
    for name, values in grid.items():
        if not values:
            raise ValueError(f"grid {name}: expected values")
    points = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        merged = {**(overrides or {}), **chosen}
        directory = Path(load_experiment(path, merged).output_dir) / point_name(chosen)
        title = ", ".join(f"{name} = {value}" for name, value in chosen.items())
        points.append(
            GridPoint(chosen, load_experiment(path, {**merged, "output_dir": str(directory), "title": title}))
        )
    return points


def point_name(overrides: Mapping[str, Any]) -> str:
    """Returns the folder name of a point: its keys and values, shortened and with a hash if they are long."""
    words = []
    for path, value in overrides.items():
        text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"{path.rpartition('.')[2]}={text}")
    name = "".join(letter if letter.isalnum() or letter in "=.,-_" else "_" for letter in ",".join(words))
    if len(name) <= 80 and len({word.partition("=")[0] for word in words}) == len(words):
        return name
    return f"{name[:60]}-{hashlib.sha256(json.dumps(dict(overrides), sort_keys=True).encode()).hexdigest()[:12]}"


def run_sweep(
    points: Sequence[GridPoint],
    *,
    command: Sequence[str] | None = None,
    on_point: Callable[[int, GridPoint], None] = lambda index, point: None,
    **options: Any,
) -> list[Path]:
    """Runs the points one after another, with `options` of `run_experiment`; `on_point` is called before each."""
    directories = []
    for index, point in enumerate(points):
        on_point(index, point)
        directories.append(run_experiment(point.config, command=command, **options))
        JIT_CACHE.clear()  # frees memory for the next point
    return directories


def run_sweep_with_ray(
    points: Sequence[GridPoint],
    *,
    command: Sequence[str] | None = None,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    on_point: Callable[[int, GridPoint], None] = lambda index, point: None,
) -> list[Path]:
    """Runs the points as Ray tasks, each in a process of its own.

    The run directories must be visible on all machines. Ray restarts the task of a lost machine; the run then resumes.
    Each point gets `cpus` cores and `gpus` devices of the cluster at `address`, by default of this machine. `on_point`
    is called when a point has ended.

    Raises:
        ValueError: if Ray is not installed.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("a sweep on several devices or machines needs Ray: pip install 'bass-jax[sweep]'") from None
    with ray.init(address=address, include_dashboard=False, configure_logging=False):
        # A new process per point, because a process frees a device's memory only when it ends.
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
