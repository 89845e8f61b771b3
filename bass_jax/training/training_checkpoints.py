"""Snapshots of a training: everything that the next step depends on, written while it goes on."""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

_KEEP = 2
_PLACE = "place.json"


class Place(NamedTuple):
    """Where a training stands in its data.

    Attributes:
        step: optimizer steps taken.
        epoch: passes over the corpus begun, less one.
        batch: batches of this epoch already used.
        shards: numbers of the shards that this epoch reads.
    """

    step: int
    epoch: int
    batch: int
    shards: list[int]


class SnapshotWriter:
    """Writes ``directory/step_00000123`` whole or not at all, in the background, and drops all but the last two.

    Attributes:
        best: a step whose snapshot is kept besides; None for none.
    """

    def __init__(self, directory: Path):
        """Args: directory: of the snapshots."""
        self.best: int | None = None
        self._directory = directory
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._mover = ThreadPoolExecutor(1)
        self._pending: tuple[Place, Future[None]] | None = None

    def save(self, place: Place, state: Any) -> None:
        """Begins to write a snapshot; `state` may be donated afterwards.

        Raises:
            ValueError: if this or the snapshot before cannot be written, saying which is the last that was.
        """
        self.finish()
        partial = self._partial(place)
        _remove(partial)
        try:
            partial.mkdir(parents=True)
            # A copy: on a CPU the writer may read the very buffers that the next step overwrites.
            self._checkpointer.save((partial / "state").absolute(), jax.tree.map(jnp.copy, state))
        except Exception as error:  # Orbax and TensorStore raise what they meet.
            raise self._failure(place, error) from None
        self._pending = place, self._mover.submit(self._move, place)

    def _move(self, place: Place) -> None:
        """Waits until a snapshot is written and moves it to its place: a run that is killed then goes on from it."""
        partial, final = self._partial(place), self._directory / _name(place.step)
        self._checkpointer.wait_until_finished()
        (partial / _PLACE).write_text(json.dumps(place._asdict()))
        _remove(final)
        partial.rename(final)

    def finish(self) -> None:
        """Waits for the snapshot that is being written, and drops those that it makes superfluous."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        place, moved = pending
        try:
            moved.result()
        except Exception as error:
            raise self._failure(place, error) from None
        kept = {_name(self.best)} if self.best is not None else set()
        for old in sorted(self._directory.glob("step_*"))[:-_KEEP]:
            if old.name not in kept:
                _remove(old)

    def __enter__(self) -> "SnapshotWriter":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.finish()
        finally:
            self._mover.shutdown()
            self._checkpointer.close()

    def _partial(self, place: Place) -> Path:
        return self._directory / f".{_name(place.step)}.partial"

    def _failure(self, place: Place, error: Exception) -> ValueError:
        found = sorted(self._directory.glob("step_*"))
        last = f"the last one is {found[-1].name}" if found else "there is none from before"
        reason = " ".join(str(error).split())[:200]
        return ValueError(f"{self._directory}: snapshot of step {place.step} cannot be written ({reason}); {last}")


def load_snapshot(directory: Path, like: Any, step: int | None = None) -> tuple[Place, Any] | None:
    """Reads the snapshot of `step`, by default the last; None when there is none.

    Args:
        directory: of the snapshots.
        like: a state of the same structure, shapes, dtypes and placement.
        step: which.

    Raises:
        ValueError: if it is not a snapshot of such a state.
    """
    found = sorted(directory.glob("step_*" if step is None else _name(step)))
    if not found:
        return None
    path = found[-1]
    try:
        place = Place(**json.loads((path / _PLACE).read_text()))
        restore_args = ocp.checkpoint_utils.construct_restore_args(like)
        with ocp.PyTreeCheckpointer() as checkpointer:
            args = ocp.args.PyTreeRestore(like, restore_args=restore_args)
            state = checkpointer.restore((path / "state").absolute(), args=args)
    except Exception as error:  # Orbax and TensorStore raise what they meet.
        raise ValueError(f"{path}: not a snapshot of this training: {' '.join(str(error).split())[:200]}") from None
    expected, found_shapes = (jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (like, state))
    if expected != found_shapes:
        raise ValueError(f"{path}: a snapshot of a draft of another shape")
    return place, state


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
