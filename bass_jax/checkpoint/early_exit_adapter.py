"""The adapter of an early exit on disk: one of our checkpoints without the target's layers."""

import json
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.checkpoint.assemble import place_arrays
from bass_jax.checkpoint.manifest import WEIGHTS, Manifest, has_manifest, read_manifest
from bass_jax.checkpoint.safetensors import tensor_builders, write_safetensors
from bass_jax.checkpoint.save import replaced
from bass_jax.checkpoint.tokenizer import Tokenizer, fingerprint_mismatch
from bass_jax.drafters import EarlyExitModel, early_exit_model
from bass_jax.models import Model
from bass_jax.runtime.files import read_json

NAME = "early_exit.json"
KEYS = ("num_layers", "mlp_width", "width")


def is_early_exit(path: str | PathLike[str]) -> bool:
    """Returns whether `path` is a directory of `save_early_exit`."""
    return has_manifest(Path(path)) and (Path(path) / NAME).is_file()


def save_early_exit(
    directory: str | PathLike[str],
    model: EarlyExitModel,
    *,
    tokenizer: Tokenizer | None = None,
    source: str | None = None,
    license: str | None = None,
) -> None:
    """Writes the adapter in bfloat16, the sizes in ``early_exit.json``, and a manifest.

    Args:
        directory: replaced if it is a checkpoint.
        model: the layers with the adapter.
        tokenizer: the target's; its fingerprint is stored.
        source: where the weights came from.
        license: of the weights.

    Raises:
        ValueError: if `directory` exists and is not a checkpoint.
    """
    trained = {name: leaf for name, leaf in model.params.items() if name != "embedding"}
    arrays = {name: jnp.asarray(leaf, jnp.bfloat16) for name, leaf in flatten_dict(trained, sep="/").items()}
    _, mlp_width, width = arrays["adapter/gate_up"].shape
    sizes = dict(zip(KEYS, (model.config.num_layers, mlp_width, width), strict=True))
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    with replaced(Path(directory)) as partial:
        write_safetensors(partial / WEIGHTS, arrays, lambda name: np.asarray(arrays[name]))
        (partial / NAME).write_text(json.dumps(sizes, indent=2) + "\n")
        Manifest(source=source, license=license, tokenizer_fingerprint=fingerprint).write(partial)


def load_early_exit(
    path: str | PathLike[str],
    target: Model,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> EarlyExitModel:
    """Loads an adapter for the first layers of `target`, in the target's dtype.

    Args:
        path: a directory of `save_early_exit`.
        target: its layers, norm and head are shared.
        tokenizer: the target's; None for no check.
        dtype: of the adapter, instead of the target's.
        mesh: devices that each hold the whole adapter.

    Raises:
        ValueError: naming the file, if it is damaged or of another target.
    """
    path = Path(path)
    manifest, sizes = read_manifest(path), read_json(path / NAME)
    with manifest.verifying(path):
        if sorted(sizes) != sorted(KEYS) or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
            raise ValueError(f"{path / NAME}: expected positive integers {', '.join(KEYS)}")
        expected = None if tokenizer is None else tokenizer.fingerprint
        if reason := fingerprint_mismatch("adapter", manifest.tokenizer_fingerprint, expected):
            raise ValueError(f"{path}: {reason}")
        num_layers, mlp_width, width = (sizes[key] for key in KEYS)
        if width != target.config.width or num_layers > target.config.num_layers:
            raise ValueError(
                f"{path}: an adapter of width {width} after layer {num_layers}: the target has the width "
                f"{target.config.width} and {target.config.num_layers} layers"
            )
        shapes = {
            "adapter/gate_up": (2, mlp_width, width),
            "adapter/down": (width, mlp_width),
            "adapter_norm": (width,),
        }
        kind = jnp.dtype(dtype or target.config.dtype)
        builders = tensor_builders(path / WEIGHTS, {name: jax.ShapeDtypeStruct(s, kind) for name, s in shapes.items()})
        shardings = None if mesh is None else dict.fromkeys(shapes, NamedSharding(mesh, PartitionSpec()))
        return early_exit_model(target, num_layers, place_arrays(builders, shardings))
