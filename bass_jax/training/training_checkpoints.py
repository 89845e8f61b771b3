"""Training checkpoints: all that the next step depends on, written by Orbax in the background."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN, PreservationPolicy

_NUM_KEPT = 2


class TrainPosition(NamedTuple):
    """The position of a training in its data."""

    step: int  # optimizer steps taken
    epoch: int  # from 0
    batch: int  # batches of this epoch that were used
    shards: list[int]  # numbers of the shards that this epoch reads


class _BestStep(PreservationPolicy):
    """Keeps the checkpoint of the step `best`."""

    best: int | None = None

    def should_preserve(self, checkpoints, *, context):
        return [checkpoint.step == self.best for checkpoint in checkpoints]


class TrainingCheckpoints:
    """The checkpoints ``directory/step_00000123``: the last two and the best one.

    A checkpoint appears under its name when it is complete. Use it as a context manager: the end waits for the
    checkpoint that is being written.
    """

    def __init__(self, directory: Path):
        """Opens the directory, which is made if it does not exist."""
        self._directory = directory
        self._policy = _BestStep()
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                step_prefix="step",
                step_format_fixed_length=8,
                preservation_policy=AnyPreservationPolicy([LatestN(_NUM_KEPT), self._policy]),
                cleanup_tmp_directories=True,
            ),
        )

    def save(self, position: TrainPosition, state: Any, best: int | None = None) -> None:
        """Begins to write a checkpoint.

        Args:
            position: of the training.
            state: any pytree of arrays; it may be donated afterwards.
            best: the step of a checkpoint to keep.

        Raises:
            ValueError: if this or the previous checkpoint cannot be written.
        """
        self.wait()
        self._policy.best = best
        try:
            # Copied because on a CPU Orbax may read the buffers that the next step overwrites.
            state = ocp.args.PyTreeSave(jax.tree.map(jnp.copy, state))
            args = ocp.args.Composite(state=state, position=ocp.args.JsonSave(position._asdict()))
            self._manager.save(position.step, args=args, force=True)
        except Exception as error:  # Orbax and TensorStore raise errors of many types.
            raise self._failure(error) from None

    def load(self, like: Any, step: int | None = None) -> tuple[TrainPosition, Any] | None:
        """Reads the checkpoint of `step`, by default the last one; None if there is none.

        Args:
            like: a state with the same structure, shapes, dtypes and placement.
            step: of the checkpoint.

        Raises:
            ValueError: if it is not a checkpoint of such a state.
        """
        step = self._manager.latest_step() if step is None else step
        if step is None or step not in self._manager.all_steps():
            return None
        try:
            restore_args = ocp.checkpoint_utils.construct_restore_args(like)
            args = ocp.args.Composite(
                state=ocp.args.PyTreeRestore(like, restore_args=restore_args), position=ocp.args.JsonRestore()
            )
            found = self._manager.restore(step, args=args)
            return TrainPosition(**found["position"]), found["state"]
        except Exception as error:  # Orbax and TensorStore raise errors of many types.
            raise ValueError(
                f"{self._directory}/{_name(step)}: not a checkpoint of this training, or of a draft of another size: "
                f"{_shortened(error)}"
            ) from None

    def wait(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            ValueError: if it cannot be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from None

    def __enter__(self) -> "TrainingCheckpoints":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    def _failure(self, error: Exception) -> ValueError:
        found = sorted(path.name for path in self._directory.glob("step_*") if not path.suffix)
        last = f"the last one is {found[-1]}" if found else "there is none"
        return ValueError(f"{self._directory}: a checkpoint cannot be written ({_shortened(error)}); {last}")


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
