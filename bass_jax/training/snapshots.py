"""Snapshots of a training: everything that the next step depends on."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

_KEEP = 2
_PLACE = "place.json"


class Place(NamedTuple):
    """Where a training stands in its data.

    Attributes:
        step: optimiser steps taken.
        epoch: passes over the corpus begun, less one.
        batch: batches of this epoch already used.
        shards: numbers of the shards that this epoch reads.
    """

    step: int
    epoch: int
    batch: int
    shards: list[int]


def save_snapshot(directory: Path, place: Place, state: Any) -> None:
    """Writes ``directory/step_00000123`` whole or not at all, and drops all but the last two."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"step_{place.step:08d}"
    partial = directory / f".{name}.partial"
    _remove(partial)
    partial.mkdir()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((partial / "state").absolute(), state)
    (partial / _PLACE).write_text(json.dumps(place._asdict()))
    _remove(directory / name)
    partial.rename(directory / name)
    for old in sorted(directory.glob("step_*"))[:-_KEEP]:
        _remove(old)


def load_snapshot(directory: Path, like: Any) -> tuple[Place, Any] | None:
    """Reads the last snapshot; None when there is none.

    Args:
        directory: of the snapshots.
        like: a state of the same structure, shapes and dtypes.

    Raises:
        ValueError: if it is not a snapshot of such a state.
    """
    found = sorted(directory.glob("step_*"))
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


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
