"""What a checkpoint holds, without reading its arrays."""

import dataclasses
import math
from os import PathLike
from pathlib import Path

import jax.numpy as jnp

from bass_jax.checkpoint import config_json
from bass_jax.checkpoint import manifest as manifest_file
from bass_jax.checkpoint.load import has_tokenizer, load_tokenizer, open_source, read_model_config, resolve
from bass_jax.checkpoint.manifest import read_manifest
from bass_jax.models import abstract_params, preset
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.trees import flatten


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What `inspect_checkpoint` found.

    Attributes:
        path: of the checkpoint.
        config: of the model, with the stored dtype.
        shapes: every parameter's shape by its path; a shared embedding is the target's and not among them.
        num_stored_bytes: of the checkpoint on disk.
        tokenizer_fingerprint: None where the checkpoint has no tokenizer and names none.
        tokenizer_vocab_size: None where the checkpoint has no tokenizer.
        source: where the weights came from, if the checkpoint says.
        license: of the weights, if the checkpoint says.
    """

    path: Path
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    num_stored_bytes: int
    tokenizer_fingerprint: str | None
    tokenizer_vocab_size: int | None
    source: str | None = None
    license: str | None = None

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters in the stored dtypes, in memory."""
        dtypes = {name: boxed.value.dtype for name, boxed in flatten(abstract_params(self.config)).items()}
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in self.shapes.items())

    @property
    def num_cache_bytes_per_token(self) -> int:
        """Bytes of the key-value cache that one token of one row takes."""
        size = jnp.dtype(self.config.dtype).itemsize
        attentions = [layer.attention for layer in self.config.layers]
        return 2 * size * sum(attention.num_kv_heads * attention.head_dim for attention in attentions)


def inspect_checkpoint(path: str | PathLike[str]) -> Inspection:
    """Says what a checkpoint holds.

    Args:
        path: anything that `bass_jax.checkpoint.load_model` takes.

    Raises:
        ValueError: as `load_model`, as far as it can be seen without reading arrays.
    """
    path = resolve(path)
    is_ours = path.is_dir() and (path / manifest_file.NAME).is_file()
    manifest = read_manifest(path) if is_ours else None
    config = config_json.read_config(path) if is_ours else read_model_config(open_source(path))
    shapes = {name: tuple(boxed.value.shape) for name, boxed in flatten(abstract_params(config)).items()}
    if manifest is not None and manifest.shares_embedding:
        del shapes["embedding"]
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    fingerprint = None if manifest is None else manifest.tokenizer_fingerprint
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return Inspection(
        path=path,
        config=config,
        shapes=shapes,
        num_stored_bytes=sum(file.stat().st_size for file in files),
        tokenizer_fingerprint=fingerprint if tokenizer is None else tokenizer.fingerprint,
        tokenizer_vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        source=None if manifest is None else manifest.source,
        license=None if manifest is None else manifest.license,
    )


def inspect_preset(name: str) -> Inspection:
    """Says what a preset's checkpoint would hold; nothing is stored.

    Raises:
        ValueError: if there is no preset of that name.
    """
    config = preset(name)
    shapes = {path: tuple(boxed.value.shape) for path, boxed in flatten(abstract_params(config)).items()}
    return Inspection(Path(name), config, shapes, 0, None, None, source="preset: shapes alone")


def why_not_a_pair(target: Inspection, draft: Inspection) -> str | None:
    """Returns why `draft` cannot propose for `target`, or None if it can.

    Vocabularies padded to different sizes are no reason; different tokenizers are.
    """
    fingerprints = target.tokenizer_fingerprint, draft.tokenizer_fingerprint
    if None not in fingerprints and fingerprints[0] != fingerprints[1]:
        return f"the tokenizers differ ({fingerprints[1]} is not {fingerprints[0]}): token ids mean different text"
    for role, model in (("target", target), ("draft", draft)):
        if target.tokenizer_vocab_size is not None and model.config.vocab_size < target.tokenizer_vocab_size:
            return (
                f"the {role}'s vocabulary has {model.config.vocab_size} tokens, "
                f"the tokenizer {target.tokenizer_vocab_size}"
            )
    shares = "embedding" not in draft.shapes
    width = target.config.embedding_width or target.config.width
    if shares and (draft.config.embedding_width, draft.config.vocab_size) != (width, target.config.vocab_size):
        return (
            f"the draft shares an embedding of {draft.config.embedding_width} x {draft.config.vocab_size}, "
            f"the target's is {width} x {target.config.vocab_size}"
        )
    return None
