"""Describes a checkpoint without reading its arrays."""

import dataclasses
import math
from os import PathLike
from pathlib import Path

import jax.numpy as jnp

from bass_jax.checkpoint.config_json import read_config_json
from bass_jax.checkpoint.load import has_tokenizer, load_tokenizer, open_source, read_model_config, resolve
from bass_jax.checkpoint.manifest import Manifest, has_manifest, read_manifest
from bass_jax.checkpoint.pair_directory import config_mismatch
from bass_jax.checkpoint.speculators import (
    Speculator,
    is_speculator,
    mismatch,
    read_speculator_config,
    speculator_shapes,
)
from bass_jax.checkpoint.tokenizer import fingerprint_mismatch
from bass_jax.models import param_shapes, preset
from bass_jax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The description of a checkpoint.

    Attributes:
        path: of the checkpoint.
        config: of the model, with the stored dtype.
        shapes: shapes of the stored parameters by path; a shared embedding is the target's and not among them.
        num_stored_bytes: bytes on disk.
        tokenizer_fingerprint: None if the checkpoint has no tokenizer and names none.
        tokenizer_vocab_size: None if the checkpoint has no tokenizer.
        source: where the weights came from, if known.
        license: license of the weights, if known.
        head: what a draft head reads besides tokens; None for a model.
    """

    path: Path
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    num_stored_bytes: int
    tokenizer_fingerprint: str | None
    tokenizer_vocab_size: int | None
    source: str | None = None
    license: str | None = None
    head: Speculator | None = None

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters in memory, in the stored dtypes."""
        if self.head is not None:
            return self.num_parameters * jnp.dtype(self.config.dtype).itemsize
        leaves = param_shapes(self.config)
        return sum(math.prod(shape) * leaves[name].dtype.itemsize for name, shape in self.shapes.items())

    @property
    def num_cache_bytes_per_token(self) -> int:
        """Bytes of the key-value cache per token of one row, without the states of recurrent layers."""
        size = jnp.dtype(self.config.dtype).itemsize
        return size * sum(
            num_heads * (key_dim + value_dim) for num_heads, key_dim, value_dim in self.config.cache_shapes
        )


def inspect_checkpoint(path: str | PathLike[str]) -> Inspection:
    """Describes a checkpoint.

    Args:
        path: anything that `bass_jax.checkpoint.load_model` accepts.

    Raises:
        ValueError: as in `load_model`, for errors that can be found without reading arrays.
    """
    path = resolve(path)
    is_ours, head = has_manifest(path), None
    manifest = read_manifest(path) if is_ours else Manifest()
    if is_speculator(path):
        head = read_speculator_config(path)
        config = dataclasses.replace(head.config, dtype=open_source(path).dtype)
        shapes = speculator_shapes(path, head)
    else:
        config = read_config_json(path) if is_ours else read_model_config(open_source(path))
        shapes = {name: leaf.shape for name, leaf in param_shapes(config).items()}
    if manifest.shares_embedding:
        del shapes["embedding"]
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return Inspection(
        path=path,
        config=config,
        shapes=shapes,
        num_stored_bytes=sum(file.stat().st_size for file in files),
        tokenizer_fingerprint=manifest.tokenizer_fingerprint if tokenizer is None else tokenizer.fingerprint,
        tokenizer_vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        source=manifest.source,
        license=manifest.license,
        head=head,
    )


def inspect_preset(name: str) -> Inspection:
    """Describes the checkpoint that a preset would have; nothing is stored.

    Raises:
        ValueError: if there is no preset of that name.
    """
    config = preset(name)
    shapes = {path: leaf.shape for path, leaf in param_shapes(config).items()}
    return Inspection(Path(name), config, shapes, 0, None, None, source="preset: shapes alone")


def why_not_a_pair(target: Inspection, draft: Inspection) -> str | None:
    """Returns why `draft` cannot propose for `target`, or None if it can."""
    if reason := fingerprint_mismatch("draft", draft.tokenizer_fingerprint, target.tokenizer_fingerprint):
        return None if _can_translate(target, draft) else reason
    if draft.head is not None:
        return mismatch(draft.head, target.config, target.tokenizer_vocab_size)
    if reason := config_mismatch(target.config, draft.config, target.tokenizer_vocab_size):
        return reason
    width = target.config.embedding_width or target.config.width
    is_shared = "embedding" not in draft.shapes
    if is_shared and (draft.config.embedding_width, draft.config.vocab_size) != (width, target.config.vocab_size):
        return (
            f"the draft shares an embedding of {draft.config.embedding_width} x {draft.config.vocab_size}, "
            f"the target's is {width} x {target.config.vocab_size}"
        )
    return None


def _can_translate(target: Inspection, draft: Inspection) -> bool:
    """Returns whether a draft with another tokenizer is a model whose tokenizer is known, as the target's is."""
    is_model = draft.head is None and draft.config.hidden_width is None
    return is_model and None not in (target.tokenizer_vocab_size, draft.tokenizer_vocab_size)
