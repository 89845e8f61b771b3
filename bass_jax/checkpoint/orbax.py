"""Writes and reads parameters with Orbax."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from bass_jax.checkpoint.manifest import one_line
from bass_jax.checkpoint.trees import flatten

_SUBDIRECTORY = "params"


def write_arrays(directory: Path, tree: Any) -> None:
    """Writes a nested dict of arrays into ``directory/params``."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((directory / _SUBDIRECTORY).absolute(), tree)
    # Not needed on a file system, and it holds the path that the directory had while it was written.
    (directory / _SUBDIRECTORY / "commit_success.txt").unlink(missing_ok=True)


def read_arrays(directory: Path, expected: Any) -> Any:
    """Reads ``directory/params``, every array cast and straight to where it belongs.

    Args:
        directory: the checkpoint.
        expected: nested dict of `jax.ShapeDtypeStruct` with a sharding each; dtypes are what the stored
            arrays are cast to.

    Returns:
        The arrays in the structure of `expected`.

    Raises:
        ValueError: naming directory and tensor, if one is missing, extra or misshapen, or unreadable.
    """
    path = (directory / _SUBDIRECTORY).absolute()
    if not path.is_dir():
        raise ValueError(f"{directory}: no parameters: {path.name}/ is missing")
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(path)
            stored = flatten(metadata.item_metadata.tree)
        except Exception as error:  # Orbax and TensorStore raise what they meet.
            raise ValueError(f"{path}: not a readable Orbax checkpoint: {one_line(error)}") from None
        wanted = flatten(expected)
        if missing := sorted(wanted.keys() - stored.keys()):
            raise ValueError(f"{path}: missing tensor {missing[0]!r} ({len(missing)} missing)")
        if extra := sorted(stored.keys() - wanted.keys()):
            raise ValueError(f"{path}: unexpected tensor {extra[0]!r} ({len(extra)} unexpected)")
        for name, leaf in wanted.items():
            _check(path, name, stored[name], leaf)
        restore_args = ocp.checkpoint_utils.construct_restore_args(expected)
        try:
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(expected, restore_args=restore_args))
        except Exception as error:
            raise ValueError(f"{path}: damaged: {one_line(error)}") from None


def _check(path: Path, name: str, stored: Any, leaf: jax.ShapeDtypeStruct) -> None:
    if tuple(stored.shape) != tuple(leaf.shape):
        raise ValueError(f"{path}: tensor {name!r} has the shape {tuple(stored.shape)}; expected {leaf.shape}")
    if jnp.issubdtype(stored.dtype, jnp.floating) != jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(f"{path}: tensor {name!r} has the dtype {stored.dtype}; expected {leaf.dtype}")
